"""Faults planted in training loops: the watch names the first number out of range, and changes no number."""

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampcompile
from ampcompile.compiler.watched_graph import LastMagnitudes
from ampcompile.errors import OptionError
from ampcompile.insight.watch import Watch

FAULT_AT = 3
"""The call, from 1 on, in which the fault is there."""
LOWERED = pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.ci)])


class Net(nn.Module):
    """Two linears with a part between them, which `fault` multiplies as each case chooses."""

    def __init__(self, between: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(16, 32), nn.Linear(32, 16), between
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, fault: Tensor) -> Tensor:
        h = self.first(x)
        h = self.between(h, fault, *self.layers)
        return self.last(h).float()


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return grad * factor, None


def product(h: Tensor, fault: Tensor) -> Tensor:
    return (h * 0 + fault) @ (torch.ones(32, 32) * fault)  # the fault


def attention(h: Tensor, fault: Tensor) -> Tensor:
    q, k = (h * 0 + fault).half(), (h * 0 + fault).half()
    scores = q @ k.t()  # the fault
    return scores.softmax(-1).half() @ h.half()


def convolution(h: Tensor, fault: Tensor, conv: nn.Module) -> Tensor:
    return conv((h.view(4, 2, 4, 4) * 0 + 1).half() * fault.half()).view(4, 32)  # the fault


def norm(h: Tensor, fault: Tensor) -> Tensor:
    h = h.half() * fault.half()
    variance = h.square().mean(-1, keepdim=True)  # the fault
    return h * (variance + 1).rsqrt()


def recurrent(h: Tensor, fault: Tensor, cell: nn.Module) -> Tensor:
    state = h * 0
    for _ in range(3):
        state = cell((h * 0 + 1) * fault, state)  # the fault
    return state


def zero_over_zero(h: Tensor, fault: Tensor) -> Tensor:
    return h.float() - (fault - 7.0) / (fault - 7.0)  # the fault


def running_sum(h: Tensor, fault: Tensor) -> Tensor:
    return (h.half() * 0 + fault.half()).cumsum(-1)  # the fault


def logarithm_of_softmax(h: Tensor, fault: Tensor) -> Tensor:
    return (torch.arange(32) * -fault).softmax(0).log() + h  # the fault


def embedding(h: Tensor, fault: Tensor, table: nn.Module) -> Tensor:
    """The rows' gradients fit 16 bits, the sum of those of a row that is looked up 4096 times doesn't."""
    rows = F.embedding(torch.zeros(4096, dtype=torch.int64), table.weight.half())  # the fault
    return h.float() + Backward.apply(rows.float().mean(0), fault)


CASES = {  # a computation, the fault's value, the op that is named, and the layer that the computation takes
    "multiplied in 16 bits": (lambda h, fault: h.half() * fault.half(), 6e4, "aten.mul"),
    "added in 16 bits": (lambda h, fault: h.half() + fault.half() + fault.half(), 6e4, "aten.add"),
    "inf from a division": (lambda h, fault: h.float() / (fault - 7.0), 7.0, "aten.div"),
    "NaN from a root": (lambda h, fault: (h.float().abs() + 2 - fault).sqrt(), 1e3, "aten.sqrt"),
    "an exponential": (lambda h, fault: (h.float() + fault - 1).exp(), 200.0, "aten.exp"),
    "a logarithm": (lambda h, fault: (h.float().abs() + 2 - fault).log(), 1e3, "aten.log"),
    "a product": (product, 200.0, "aten.mm"),
    "a sum in 16 bits": (lambda h, fault: h + (h.half() * 0 + fault.half()).sum(0), 4e4, "aten.sum"),
    "attention scores": (attention, 300.0, "aten.mm"),
    "a convolution": (convolution, 4e4, "aten.convolution", lambda: nn.Conv2d(2, 2, 3, padding=1)),
    "a norm's variance": (norm, 1e4, "aten.pow"),
    "a gated recurrent unit": (recurrent, 6e4, "aten.addmm", lambda: nn.GRUCell(32, 32)),
    "0/0": (zero_over_zero, 7.0, "aten.div"),
    "a running sum": (running_sum, 4e3, "aten.cumsum"),
    "a logarithm of a softmax": (logarithm_of_softmax, 99.0, "aten.log"),
    "an embedding's gradient": (embedding, 1e9, "aten.embedding_dense_backward", lambda: nn.Embedding(2, 32)),
}


def line_of(function: Callable[..., object], text: str) -> str:
    """The place of the line that has the text."""
    lines, start = inspect.getsourcelines(function)
    return next(f"{__file__}:{start + i}" for i, line in enumerate(lines) if text in line)


def trained(
    model: nn.Module, faults: dict[int, float], scale: float = 1.0, growth: int = 2000, **options: object
) -> Watch:
    """The watch over six steps with the fault in some of them; the scale grows after so many that weren't skipped."""
    torch.manual_seed(0)
    compiled = torch.compile(
        model, backend="amp", options={"dtype": torch.float16, "watch": True, "lower": "aot_eager", **options}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = ampcompile.GradScaler("cpu", init_scale=scale, growth_factor=64.0, growth_interval=growth)
    for call in range(1, 7):
        optimizer.zero_grad()
        scaler.scale(compiled(torch.randn(4, 16), torch.tensor(faults.get(call, 1.5))).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return ampcompile.watch(compiled)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.ci if "recurrent" in n else ()) for n in CASES])
def test_a_fault_between_layers(name: str) -> None:
    between, fault, op, *make = CASES[name]
    layers = [each() for each in make]
    for parameter in (parameter for layer in layers for parameter in layer.parameters()):
        nn.init.ones_(parameter)
    first = trained(Net(between, *layers), {FAULT_AT: fault}).report().first
    assert first is not None
    value, backward = first.at.value, op.endswith("_backward")
    assert (first.at.call, value.op, value.backward) == (FAULT_AT, op, backward), first
    assert first.before is not None and first.at.calls_out_of_range == 1
    lines, start = inspect.getsourcelines(between)
    marked = [i for i, line in enumerate(lines) if "# the fault" in line] or range(len(lines))
    assert value.source in [f"{__file__}:{start + i}" for i in marked], first
    assert value.module == "" or value.module.startswith("layers.0"), first


def test_a_fault_in_a_cast_is_named_by_who_reads_it_and_the_policy_advised_ends_it() -> None:
    net, again = (Net(lambda h, fault: h.float() * fault) for _ in range(2))
    report = trained(net, {FAULT_AT: 1e7}).report()
    assert 'next: options={"policy": "module last=fp32"} keeps that module in float32' in str(report)
    assert trained(again, {FAULT_AT: 1e7}, policy="module last=fp32").report().first_in_forward is None
    first = report.first
    assert first is not None and first.at.call == FAULT_AT and first.at.value.kind == "cast"
    assert (first.at.value.module, first.at.value.source) == ("last", line_of(Net.forward, "self.last(h)"))


@LOWERED
def test_a_gradient_that_a_scale_makes_too_large(lower: str) -> None:
    report = trained(Net(lambda h, _: h.relu()), {}, scale=2.0**24, lower=lower).report()
    first = report.first
    assert first is not None and first.at.value.backward and first.at.call == 1 and first.before is None
    assert report.first_in_forward is None and "in forward: none; in backward a large loss scale" in str(report)
    assert first.at.value.dtype == "f16" and first.at.value.source == line_of(Net.forward, ".float()"), first


def test_a_scale_that_is_too_large_at_first_hides_no_fault_in_forward() -> None:
    report = trained(Net(lambda h, fault: h.half() * fault.half()), {5: 6e4}, scale=2.0**24).report()
    assert report.first is not None and report.first.at.value.backward and report.first.at.call == 1
    found = report.first_in_forward
    assert found is not None and not found.at.value.backward and found.at.call == 5, report
    assert "in forward: first number out of range: call 5" in str(report)


def test_models_of_one_class_have_watches_of_their_own() -> None:
    def between(h: Tensor, fault: Tensor) -> Tensor:
        return h.half() * fault.half()

    with_fault, without = (trained(Net(between), faults).report() for faults in ({FAULT_AT: 6e4}, {}))
    assert with_fault.first is not None and without.first is None, "of the same code and options"
    assert len(with_fault.last) == len(without.last) > 0


def test_a_gradient_that_a_growing_scale_makes_too_large() -> None:
    net = Net(lambda h, _: h.relu())
    first = trained(net, {}, scale=64.0, growth=1).report().first
    assert first is not None and first.at.value.backward and first.at.call == 4 and first.before is not None
    assert first.before < 65504 < first.at.largest, first
    assert first.at.value.source == line_of(Net.forward, ".float()"), "where float32 begins, whose gradient is narrowed"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
def test_a_fault_in_backward() -> None:
    net = Net(lambda h, fault: Backward.apply(h.half(), fault.half()))
    first = trained(net, {FAULT_AT: 6e4}, scale=2.0**10).report().first
    assert first is not None and first.at.value.backward and first.at.call == FAULT_AT
    assert first.at.value.op == "aten.mul" and first.at.value.source == line_of(Backward.backward, "grad * factor")
    assert "backward" in str(first) and first.before is not None


@pytest.mark.parametrize(
    ("between", "fault", "words"),
    [
        (lambda h, fault: h.half() * fault.half(), 6e4, 'options={"dtype": torch.bfloat16}, whose range is float32'),
        (lambda h, fault: h.float() / (fault - 7.0), 7.0, "float32 has no wider range: mend the model"),
    ],
)
def test_what_to_do_next_where_no_module_or_no_wider_type_helps(
    between: Callable[..., Tensor], fault: float, words: str
) -> None:
    assert f"next: {words}" in str(trained(Net(between), {FAULT_AT: fault}).report())


def test_masks_and_nothing_wrong() -> None:
    masked = lambda h, _: h + F.softmax(h.masked_fill(h > 0, float("-inf")).clamp(-1e30), 0)
    report = trained(Net(masked), {}).report()
    assert report.first is None and str(report).startswith("no number left the range of its type")
    assert all(each.calls_out_of_range == 0 and each.share <= 1 for each in report.last)


@LOWERED
def test_no_bit_changes(lower: str) -> None:
    def numbers(watch: bool) -> list[Tensor]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        net, x = Net(lambda h, fault: F.gelu(h) * fault), torch.randn(4, 16)
        options = {"dtype": torch.bfloat16, "watch": watch, "lower": lower}
        out = torch.compile(net, backend="amp", options=options)(x, torch.tensor(1.5))
        return [out, *torch.autograd.grad(out.square().sum(), list(net.parameters()))]

    for ours, plain in zip(numbers(True), numbers(False), strict=True):
        assert torch.equal(ours, plain)


def test_calls_without_gradients_and_of_others_and_the_first_fault_is_kept() -> None:
    net, other = Net(lambda h, fault: h.half() * fault.half()), Net(lambda h, _: h)
    options = {"dtype": torch.float16, "watch": True, "lower": "aot_eager"}
    ones = torch.compile(lambda: torch.ones(2, 2) @ torch.ones(2, 2), backend="amp", options=options)
    assert str(ampcompile.watch(ones).report()).startswith("no watched value yet: call what was compiled")
    assert ones().eq(2).all() and ampcompile.watch(ones).report().first is None, "a graph without inputs"
    compiled, apart = (torch.compile(each, backend="amp", options=options) for each in (net, other))
    with torch.no_grad():
        for call in range(1, 60):
            compiled(torch.randn(4, 16), torch.tensor(6e4 if call in (FAULT_AT, 50) else 1.0))
        apart(torch.randn(4, 16), torch.tensor(1.0))
    found, clean = (ampcompile.watch(each).report() for each in (compiled, apart))
    assert found.first is not None and found.first.at.call == FAULT_AT and found.last[0].call == 59
    assert clean.first is None
    assert {each.value.module for each in clean.last} >= {"first", "last"}


def test_second_gradients_go_on_working() -> None:
    net = Net(lambda h, fault: h * fault)
    compiled = torch.compile(net, backend="amp", options={"watch": True, "lower": "aot_eager"})
    x = torch.randn(4, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(compiled(x, torch.tensor(1.5)).sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert net.first.weight.grad is not None and net.first.weight.grad.isfinite().all()


def test_what_is_watched_is_explained_as_if_it_were_not() -> None:
    reports = [
        ampcompile.explain(torch.compile(nn.Linear(4, 4), backend="amp", options=options))(torch.ones(2, 4))
        for options in ({"watch": True}, {})
    ]
    assert reports[0].casts and str(reports[0].casts) == str(reports[1].casts)


def test_what_is_not_watched_is_refused() -> None:
    model = nn.Linear(2, 2)
    for wrong in (3, model, torch.compile(model, backend="amp"), torch.compile(model, backend="eager")):
        with pytest.raises(OptionError, match=f"found '{type(wrong).__name__}', .*\"watch\": True"):
            ampcompile.watch(wrong)
    with pytest.raises(OptionError, match="lower='eager'"):
        torch.compile(model, backend="amp", options={"watch": True, "lower": "eager"})(torch.randn(1, 2))
    with pytest.raises(OptionError, match="watch=1"):
        torch.compile(model, backend="amp", options={"watch": 1})(torch.randn(1, 2))


class Reads(TorchDispatchMode):
    """Raises where the host reads a number of the device's."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Tensor:
        assert "_local_scalar_dense" not in str(func) and "nonzero" not in str(func), func
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device() -> None:
    kept, clock = LastMagnitudes(torch.ones(2)), torch.zeros(1, dtype=torch.int64)
    with Reads():
        kept.write(torch.full((2,), float("inf")), clock)
    assert kept.first() is not None


@LOWERED
def test_what_reads_masks_and_indices_is_watched(lower: str) -> None:
    def between(h: Tensor, mask: Tensor) -> Tensor:
        t = h.clone()
        t[mask.expand(4, 32)] = 0.0
        t[torch.arange(2)] = t[2:]
        return torch.where(mask, t, h)

    model, x, mask = Net(between), torch.randn(4, 16), torch.rand(4, 1) > 0.5
    plain, watched = (
        torch.compile(model, backend="amp", options={"lower": lower, "watch": watch})(x, mask)
        for watch in (False, True)
    )
    assert torch.equal(plain, watched)
