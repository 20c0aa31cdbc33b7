"""Forks, from a process that has loaded torch alone, a process for each line of its input: a use of ours in a context.

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
from torch.utils import checkpoint


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def inputs(rows=3):
    return torch.linspace(-1, 1, rows * 6, dtype=torch.float32, device="cpu").reshape(rows, 6)


def compiled(of, **options):
    given = {"dtype": torch.bfloat16, "lower": "aot_eager", **options}
    return torch.compile(of, backend="amp", options={k: v for k, v in given.items() if v is not None})


def optimized(make):
    net = model()
    optimizer, step = make(net)
    net(inputs()).square().sum().backward()
    step(optimizer)
    return net


def scaled(amp):
    net, scaler = model(), amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(net.parameters())
    scaler.scale(net(inputs()).square().sum()).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()


def with_masters(amp):
    net = model().bfloat16()
    optimizer = amp.keep_masters(torch.optim.AdamW(net.parameters()))
    net(inputs().bfloat16()).float().square().sum().backward()
    optimizer.step()


def released(amp):
    net = model().eval()
    run = compiled(net)
    with torch.no_grad():
        run(inputs())
    amp.release_masters(net)


def methods(amp):
    net = model()
    amp.compile_methods(net, "forward", lower="aot_eager", dtype=torch.bfloat16)
    net.forward(inputs())


def precisions(amp):
    with amp.precision("float32"):
        return amp.keep_fp32(model())(inputs())


def captured(amp):
    net = model()
    optimizer = amp.optim.SGD(net.parameters(), lr=0.1)
    amp.capture_step(lambda x: net(x).sum().backward(), optimizer, warm_up=1)(inputs())


CALLS = {  # of x, in the context
    "call": lambda net: compiled(net),
    "call with default options": lambda net: torch.compile(net, backend="amp"),
    "call that is watched": lambda net: compiled(net, watch=True),
    "call in float16": lambda net: compiled(net, dtype=torch.float16),
    "call with weights cast each time": lambda net: compiled(net, weights="each_call"),
    "call that keeps 16 bits": lambda net: compiled(net, outputs="low"),
}
NAMES = {  # each uses one public name, on tensors of its own
    "GradScaler": scaled,
    "Policy": lambda amp: amp.Policy(),
    "audit": lambda amp: amp.audit(model(), dtype=torch.bfloat16)(inputs()),
    "capture_step": captured,
    "compare": lambda amp: amp.compare(model())(inputs()),
    "compile_methods": methods,
    "explain": lambda amp: amp.explain(model(), dtype=torch.bfloat16)(inputs()),
    "export": lambda amp: amp.export(model().eval(), (inputs(),), dtype=torch.bfloat16),
    "free_copies": lambda amp: amp.free_copies(model()),
    "invalidate": lambda amp: amp.invalidate(model()),
    "keep_fp32": precisions,
    "keep_masters": with_masters,
    "optim": lambda amp: optimized(lambda net: (amp.optim.AdamW(net.parameters()), lambda o: o.step())),
    "precision": precisions,
    "profile_step": lambda amp: amp.profile_step(compiled(model()))(inputs()),
    "record": lambda amp: amp.record(model(), dtype=torch.bfloat16)(inputs()),
    "register_op": lambda amp: amp.register_op("aten::hypot", "float32"),
    "release_masters": released,
    "shard_policy": lambda amp: amp.shard_policy(model()),
    "watch": lambda amp: (run := compiled(model(), watch=True))(inputs()) is not None and amp.watch(run).report(),
    "weight_stats": lambda amp: amp.weight_stats(),
}


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
    "deterministic mode": within(deterministic),
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "vmap": lambda function, x: torch.vmap(function)(x.unsqueeze(1)).squeeze(1),
    "a thread": in_thread,
}


def use(name, x):
    """Use a name in the context; for what isn't a call, the numbers are those of x."""
    if name in CALLS:
        return use.call(x)
    import ampcompile

    NAMES[name](ampcompile)
    return x * 1


def numbers(tensor):
    if isinstance(tensor, torch._subclasses.FakeTensor):
        return "fake"
    return tensor.detach().double().tolist()


def attempt(context, name):
    x, net = inputs().requires_grad_(), model()
    if name in CALLS:
        use.call = CALLS[name](net)
    inside = context == "mutable saved tensors"  # which allow no other backward

    def differentiated(x):
        (y := use(name, x)).float().square().sum().backward()
        return y.detach()

    y = CONTEXTS[context](differentiated if inside else partial(use, name), x)
    if y.requires_grad:
        y.float().square().sum().backward()
    grads = [tensor.grad for tensor in (x, *net.parameters()) if tensor.grad is not None]
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
