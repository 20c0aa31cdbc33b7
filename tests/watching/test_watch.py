"""Faults planted in training loops: the watch names the first number out of range, and changes no number."""

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampcompile
from ampcompile.errors import OptionError
from ampcompile.watching.watch import Watch, WatchReport

FAULT_AT = 3
"""The call, from 1 on, in which the fault is there."""


class Net(nn.Module):
    """Two linears with a part between them; `fault` multiplies what each case chooses."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(16, 32), nn.Linear(32, 16), between

    def forward(self, x: Tensor, fault: Tensor) -> Tensor:
        h = self.first(x)
        h = self.between(h, fault)  # the fault
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
    return (h * 0 + fault) @ (torch.ones(32, 32) * fault)


FORWARD = {  # name: (what is between, the fault's value, what is named, what would have held)
    "multiplied in 16 bits": (lambda h, fault: h.half() * fault.half(), 6e4, "aten.mul", None),
    "added in 16 bits": (lambda h, fault: h.half() + fault.half() + fault.half(), 6e4, "aten.add", None),
    "squared": (lambda h, fault: (h.half() * fault.half()).square(), 500.0, "aten.", None),
    "inf from a division": (lambda h, fault: h.float() / (fault - 7.0), 7.0, "aten.div", None),
    "NaN from a root": (lambda h, fault: (h.float().abs() + 2 - fault).sqrt(), 1e3, "aten.sqrt", None),
    "an exponential": (lambda h, fault: (h.float() + fault - 1).exp(), 200.0, "aten.exp", None),
    "a logarithm": (lambda h, fault: (h.float().abs() + 2 - fault).log(), 1e3, "aten.log", None),
    "a cast": (lambda h, fault: h.float() * fault, 1e7, "to f16", "bfloat16 and float32"),
    "a product": (product, 200.0, "f", "bfloat16 and float32"),
    "a sum in 16 bits": (lambda h, fault: h + (h.half() * 0 + fault.half()).sum(0), 4e4, "aten.sum", None),
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


@pytest.mark.parametrize("name", FORWARD)
def test_a_fault_in_forward(name: str) -> None:
    between, fault, op, held = FORWARD[name]
    report = trained(Net(between), {FAULT_AT: fault}).report()
    assert report.first is not None, report
    first = report.first
    assert first.at.call == FAULT_AT and not first.at.value.backward
    assert op in f"{first.at.value.op} to {first.at.value.dtype}", first
    assert first.before is not None and first.before < 1e3 and first.at.calls_out_of_range == 1
    assert held is None or f"{held} would have held it" in str(first)
    lines, start = inspect.getsourcelines(between)
    module, places = "", [f"{__file__}:{start + i}" for i in range(len(lines))]
    if name == "a cast":
        module, places = "last", [line_of(Net.forward, "self.last(h)")]  # who reads it
    assert first.at.value.module == module and first.at.value.source in places, first


class Part(nn.Module):
    """A part of a network in a module of its own, with the layers that it needs."""

    def __init__(self, compute: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.compute, self.layers = compute, nn.ModuleList(layers)

    def forward(self, h: Tensor, fault: Tensor) -> Tensor:
        return self.compute(h, fault, *self.layers)


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


PARTS = {  # name: (the part, its layer, the fault's value, the op that is named)
    "attention scores": (attention, None, 300.0, "aten.mm"),
    "a convolution": (convolution, lambda: nn.Conv2d(2, 2, 3, padding=1), 4e4, "aten.convolution"),
    "a norm's variance": (norm, None, 1e4, "aten.pow"),
    "a gated recurrent unit": (recurrent, lambda: nn.GRUCell(32, 32), 6e4, "aten.addmm"),
    "0/0": (zero_over_zero, None, 7.0, "aten.div"),
    "a running sum": (running_sum, None, 4e3, "aten.cumsum"),
    "a logarithm of a softmax": (logarithm_of_softmax, None, 99.0, "aten.log"),
    "an embedding's gradient": (embedding, lambda: nn.Embedding(2, 32), 1e9, "aten.embedding_dense_backward"),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
@pytest.mark.parametrize("name", PARTS)
def test_a_fault_in_a_part(name: str) -> None:
    compute, layer, fault, op = PARTS[name]
    part = Part(compute, *([layer()] if layer else []))
    for parameter in part.parameters():
        nn.init.ones_(parameter)
    first = trained(Net(part), {FAULT_AT: fault}).report().first
    assert first is not None
    value = first.at.value
    assert first.at.call == FAULT_AT and value.backward == op.endswith("_backward"), first
    assert value.op == op and value.source == line_of(compute, "# the fault"), first
    assert value.module.split(".")[0] == "between", first


@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
def test_a_gradient_that_a_scale_makes_too_large(lower: str) -> None:
    first = trained(Net(lambda h, _: h.relu()), {}, scale=2.0**24, lower=lower).report().first
    assert first is not None and first.at.value.backward and first.at.call == 1 and first.before is None
    assert first.at.value.dtype == "f16" and first.at.value.source == line_of(Net.forward, ".float()"), first


def test_a_gradient_that_a_growing_scale_makes_too_large() -> None:
    net = Net(lambda h, _: h.relu())
    first = trained(net, {}, scale=64.0, growth=1).report().first
    assert first is not None and first.at.value.backward and first.at.call == 4 and first.before is not None
    assert first.before < 65504 < first.at.largest and first.held_by == ["bfloat16", "float32"], first
    assert first.at.value.source == line_of(Net.forward, ".float()"), "where float32 begins, whose gradient is narrowed"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
def test_a_fault_in_backward() -> None:
    net = Net(lambda h, fault: Backward.apply(h.half(), fault.half()))
    first = trained(net, {FAULT_AT: 6e4}, scale=2.0**10).report().first
    assert first is not None and first.at.value.backward and first.at.call == FAULT_AT
    assert first.at.value.op == "aten.mul" and first.at.value.source == line_of(Backward.backward, "grad * factor")
    assert "backward" in str(first) and first.before is not None


def test_a_fault_in_a_row_that_is_not_read_is_named_by_who_reads_it() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 256, bias=False), nn.Linear(256, 16)
            nn.init.ones_(self.first.weight)

        def forward(self, x: Tensor, fault: Tensor) -> Tensor:
            rows = torch.where(torch.arange(512)[:, None] == 3, fault, 1.0).half().expand(512, 16)
            return self.last(self.first(rows)).float() * x.mean()

    report = trained(Rows(), {FAULT_AT: 6e4}).report()
    first = report.first
    assert first is not None and first.at.call == FAULT_AT and first.at.value.module == "last", report
    assert [each.module for each in first.maybe_before] == ["first"] and first.bound is None
    assert f"or before, in a row that isn't read: first {__file__}" in str(first)
    assert "(sampled)" in str(report)


def test_a_bound_takes_the_weight_for_a_factor_in_forward_alone() -> None:
    net = Net(lambda h, fault: h.half() * fault.half())
    with torch.no_grad():
        net.last.weight.fill_(2.0)
    report = trained(net, {FAULT_AT: 1e4}).report()
    first = report.first
    assert first is not None and first.at.value.op == "aten.addmm" and first.at.value.module == "last", str(report)
    assert first.held_by == ["bfloat16", "float32"] and first.bound is not None and 65504 < first.bound < 32 * 65504 * 3
    values = [each.value for each in report.last if each.value.kind == "product"]
    assert {each.input_factor != () for each in values if each.backward} == {False}, (
        "saved by forward, or an activation"
    )
    assert {each.input_factor != () for each in values if not each.backward} == {True}


def test_a_graph_without_inputs() -> None:
    options = {"watch": True, "lower": "aot_eager"}
    ones = torch.compile(lambda: torch.ones(2, 2) @ torch.ones(2, 2), backend="amp", options=options)
    assert ones().eq(2).all() and ampcompile.watch(ones).report().first is None


def test_masks_and_nothing_wrong() -> None:
    masked = lambda h, _: h + F.softmax(h.masked_fill(h > 0, float("-inf")).clamp(-1e30), 0)  # noqa: E731
    report = trained(Net(masked), {}).report()
    assert report.first is None and str(report).startswith("no number left the range of its type")
    assert all(each.calls_out_of_range == 0 and each.share <= 1 for each in report.last)


@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
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


def test_calls_without_gradients_and_of_others() -> None:
    net, other = Net(lambda h, fault: h.half() * fault.half()), Net(lambda h, _: h)
    options = {"dtype": torch.float16, "watch": True, "lower": "aot_eager"}
    compiled, apart = (torch.compile(each, backend="amp", options=options) for each in (net, other))
    with torch.no_grad():
        compiled(torch.randn(4, 16), torch.tensor(1.0))
        compiled(torch.randn(4, 16), torch.tensor(6e4))
        apart(torch.randn(4, 16), torch.tensor(1.0))
    found, clean = (ampcompile.watch(each).report() for each in (compiled, apart))
    assert found.first is not None and found.first.at.call == 2 and clean.first is None
    assert {each.value.module for each in clean.last} >= {"first", "last"}


def test_the_first_is_kept_however_many_calls_follow() -> None:
    net = Net(lambda h, fault: h.half() * fault.half())
    compiled = torch.compile(net, backend="amp", options={"dtype": torch.float16, "watch": True, "lower": "aot_eager"})
    with torch.no_grad():
        for call in range(1, 60):
            compiled(torch.randn(4, 16), torch.tensor(6e4 if call in (FAULT_AT, 50) else 1.0))
    report: WatchReport = ampcompile.watch(compiled).report()
    assert report.first is not None and report.first.at.call == FAULT_AT
    assert report.last[0].call == 59


def test_second_gradients_go_on_working() -> None:
    net = Net(lambda h, fault: h * fault)
    compiled = torch.compile(net, backend="amp", options={"watch": True, "lower": "aot_eager"})
    x = torch.randn(4, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(compiled(x, torch.tensor(1.5)).sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert net.first.weight.grad is not None and net.first.weight.grad.isfinite().all()


def test_what_is_not_watched_is_refused() -> None:
    model = nn.Linear(2, 2)
    for wrong in (model, torch.compile(model, backend="amp"), torch.compile(model, backend="eager")):
        with pytest.raises(OptionError, match='"watch": True'):
            ampcompile.watch(wrong)
    with pytest.raises(OptionError, match="lower='eager'"):
        torch.compile(model, backend="amp", options={"watch": True, "lower": "eager"})(torch.randn(1, 2))
    with pytest.raises(OptionError, match="watch=1"):
        torch.compile(model, backend="amp", options={"watch": 1})(torch.randn(1, 2))
