"""Forks, from a process that has loaded torch alone, a process for each line of its input: a use of ours in a context.

With an argument it has loaded torch's compiler too, for which each of the others needs two seconds.
A line has the names of both. The answer, a line of JSON, has `inside`, the numbers that the use gave there or an error;
`after`, what training steps give afterwards outside of it; and how the process ended.
"""

import contextlib
import json
import os
import sys
import threading
import warnings
from functools import partial

import torch
import torch._dynamo  # each of the processes would load it
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.utils import checkpoint


class Net(nn.Sequential):
    """With a method that can be compiled alone."""

    def twice(self, x):
        return 2 * self(x)


def model():
    torch.manual_seed(0)
    return Net(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def inputs(rows=3):
    return torch.linspace(-1, 1, rows * 6, dtype=torch.float32, device="cpu").reshape(rows, 6)


def compiled(of, **options):
    # With torch's products, which a call has too that a mode leaves to eager autocast: on each CPU the same numbers.
    given = {"dtype": torch.bfloat16, "lower": "aot_eager", "products": "torch", **options}
    return torch.compile(of, backend="amp", options={k: v for k, v in given.items() if v is not None})


def differentiate(result):
    if result.requires_grad:
        result.float().square().sum().backward()


def optimized(amp, net):
    optimizer = amp.optim.AdamW(net.parameters())
    differentiate(net(inputs()))
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()


def scaled(amp, net):
    scaler, optimizer = amp.GradScaler("cpu"), torch.optim.AdamW(net.parameters())
    differentiate(scaler.scale(net(inputs())))
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()


def with_masters(amp, net):
    optimizer = torch.optim.AdamW(net.bfloat16().parameters())
    amp.keep_masters(optimizer)
    differentiate(net(inputs().bfloat16()))
    optimizer.step()


def released(amp, net):
    run = compiled(net.eval())
    with torch.no_grad():
        run(inputs())
    amp.release_masters(net)
    run(inputs())


def methods(amp, net):
    if "twice" not in vars(net):  # a checkpoint comes by twice
        amp.compile_methods(net, "twice", lower="aot_eager", dtype=torch.bfloat16)
    net.twice(inputs())


def captured(amp, net):
    optimizer = amp.optim.SGD(net.parameters(), lr=0.1)

    def step(x):
        differentiate(net(x))
        optimizer.step()

    run = amp.capture_step(step, optimizer, warm_up=1)
    run(inputs()), run(inputs())


def precise(amp, net):
    return amp.precision(torch.float32)(amp.keep_fp32(net))(inputs())


CALLS = {  # of x, in the context
    "call": lambda net: compiled(net),
    "call with default options": lambda net: torch.compile(net, backend="amp"),
    "call that is watched": lambda net: compiled(net, watch=True),
    "call in float16": lambda net: compiled(net, dtype=torch.float16),
    "call with weights cast each time": lambda net: compiled(net, weights="every_call"),
    "call that keeps 16 bits": lambda net: compiled(net, outputs="autocast"),
}
NAMES = {  # a use of each public name, with a model
    "GradScaler": scaled,
    "Policy": lambda amp, net: amp.Policy.parse("op softmax=fp32"),
    "audit": lambda amp, net: amp.audit(net, dtype=torch.bfloat16)(inputs()),
    "capture_step": captured,
    "compare": lambda amp, net: amp.compare(*[amp.record(net, lower="aot_eager")(inputs()) for _ in range(2)]),
    "compile_methods": methods,
    "explain": lambda amp, net: str(amp.explain(net, dtype=torch.bfloat16)(inputs())),
    "export": lambda amp, net: amp.export(net.eval(), (inputs(),), dtype=torch.bfloat16),
    "free_copies": lambda amp, net: amp.free_copies(net),
    "invalidate": lambda amp, net: amp.invalidate(net),
    "keep_fp32": precise,
    "keep_masters": with_masters,
    "optim": optimized,
    "precision": precise,
    "profile_step": lambda amp, net: amp.profile_step(compiled(net))(inputs()),
    "record": lambda amp, net: amp.record(net, dtype=torch.bfloat16)(inputs()),
    "register_op": lambda amp, net: amp.register_op("aten::hypot", "float32"),
    "release_masters": released,
    "watch": lambda amp, net: (run := compiled(net, watch=True))(inputs()) is None or str(amp.watch(run).report()),
    "weight_stats": lambda amp, net: amp.weight_stats(),
}
WITHOUT_USE = {"shard_policy"}  # needs several processes


class Adds(torch.overrides.TorchFunctionMode):
    """A function mode that passes everything on."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Counts(torch.utils._python_dispatch.TorchDispatchMode):
    """A dispatch mode that passes everything on."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def other_defaults():
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def profiled(**options):
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options)


def flops():
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False)


def fakes():
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def within(make):
    """Runs a function in a context."""

    def run(function, x):
        with make():
            return function(x)

    return run


def all_fake(function, x):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        use.net = model()
        return function(inputs())


def in_thread(function, x):
    found = []
    thread = threading.Thread(target=lambda: found.append(function(x)))
    thread.start()
    thread.join()
    return found[0]


def selective(function, x):
    chosen = partial(checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    return checkpoint.checkpoint(function, x, use_reentrant=False, context_fn=chosen)


hooks, graph = torch.autograd.graph.saved_tensors_hooks, torch.autograd.graph
CONTEXTS = {
    "nothing": within(contextlib.nullcontext),
    "inference mode": within(torch.inference_mode),
    "no_grad": within(torch.no_grad),
    "other defaults": within(other_defaults),
    "a fake mode": within(fakes),
    "a fake mode with fakes alone": all_fake,
    "a dispatch mode": within(Counts),
    "a flop counter": within(flops),
    "a function mode": within(Adds),
    "hooks that count": within(lambda: hooks(lambda t: t, lambda t: t)),
    "hooks that copy": within(graph.save_on_cpu),
    "hooks that are disabled": within(lambda: graph.disable_saved_tensors_hooks("no hooks")),
    "mutable saved tensors": within(graph.allow_mutation_on_saved_tensors),
    "a reentrant checkpoint": partial(checkpoint.checkpoint, use_reentrant=True),
    "a checkpoint": partial(checkpoint.checkpoint, use_reentrant=False),
    "a selective checkpoint": selective,
    "anomaly mode": within(torch.autograd.detect_anomaly),
    "a profiler": within(profiled),
    "a profiler of shapes": within(lambda: profiled(record_shapes=True, profile_memory=True, with_stack=True)),
    "a profiler of all threads": within(
        lambda: profiled(record_shapes=True, experimental_config=_ExperimentalConfig(profile_all_threads=True))
    ),
    "deterministic mode": within(deterministic),
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "vmap": lambda function, x: torch.vmap(function)(x.unsqueeze(1)).squeeze(1),
    "a thread": in_thread,
}


def use(name, x):
    """Use a name in the context; for what isn't a call, the numbers are those of x."""
    if name in CALLS:
        use.call = use.call or CALLS[name](use.net)
        return use.call(x)
    import ampcompile

    NAMES[name](ampcompile, use.net)
    return x * 1


def numbers(tensor):
    if isinstance(tensor, torch._subclasses.FakeTensor):
        return "fake"
    return tensor.detach().double().tolist()


def attempt(context, name):
    x, use.net, use.call = inputs().requires_grad_(), model(), None
    inside = context == "mutable saved tensors"  # which allow no other backward

    def differentiated(x):
        (y := use(name, x)).float().square().sum().backward()
        return y.detach()

    y = CONTEXTS[context](differentiated if inside else partial(use, name), x)
    if y.requires_grad:
        y.float().square().sum().backward()
    grads = [tensor.grad for tensor in (x, *use.net.parameters()) if tensor.grad is not None]
    return [str(y.dtype), *map(numbers, (y, *grads))]


def train():
    """Two training steps of a new model, then calls that may not cast."""
    import ampcompile

    net, x, found = model(), inputs(5), []
    run, optimizer = compiled(net), ampcompile.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        loss = run(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    with torch.no_grad():
        found.append(run(x).tolist())
        casts = ampcompile.weight_stats().casts
        run(x), run(x)
    stats = ampcompile.weight_stats()
    return [*found, f"{stats.casts - casts} casts", "copies" if stats.copies else "no copies"]


def tried(function, *args):
    try:
        return function(*args)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:]:
        import torch._inductor.compile_fx
        import torch._inductor.lowering
    assert "ampcompile" not in sys.modules
    for line in sys.stdin:
        context, name = json.loads(line)
        ours, theirs = os.pipe()
        if not (child := os.fork()):
            answer = {"inside": tried(attempt, context, name), "after": tried(train)}
            os.write(theirs, json.dumps(answer).encode())
            os._exit(0)
        os.close(theirs)
        with open(ours) as answers:
            answer = answers.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"status": status, **json.loads(answer or "{}")}), flush=True)
