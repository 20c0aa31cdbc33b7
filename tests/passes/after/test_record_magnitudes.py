"""What a watched graph records of each value: its magnitude, its kind, its place, its operands, its direction."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompile.passes.after.record_magnitudes import SLOTS, RecordMagnitudes, WatchedValue, watched
from ampcompile.passes.base import run_passes
from ampcompile.passes.graph import module_path, source_line

HALF, INF = torch.float16, math.inf


def recorded(f, *inputs: Tensor) -> tuple[list[WatchedValue], list[float], Tensor]:
    """The values of an inference graph, their magnitudes, and the graph's result."""
    slots = torch.zeros(SLOTS)
    gm = make_fx(lambda slots, *args: (f(*args), watched(slots, False)), tracing_mode="fake")(slots, *inputs)
    values: list[WatchedValue] = []
    run_passes([RecordMagnitudes(values)], gm)
    result, magnitudes = gm(slots, *inputs)
    assert magnitudes.shape == (SLOTS,) and not magnitudes[len(values) :].any()
    return values, magnitudes[: len(values)].tolist(), result


A, B = torch.tensor([[1.0, -3.0], [0.5, 2.0]]), torch.tensor([[2.0, 0.0], [-1.0, 4.0]])
CASES = {  # name: (what is computed of A and B, kinds, magnitudes)
    "a product": (lambda a, b: a.half() @ b.half(), ["cast", "cast", "product"], [3.0, 4.0, 12.0]),
    "a product in float32": (lambda a, b: a @ b, [], []),
    "a cast reads more than it writes": (lambda a, b: (a * 1e5).half(), ["cast"], [3e5]),
    "a cast of infinite numbers": (lambda a, b: torch.where(a > 1, INF, a).half(), ["cast"], [3.0]),
    "a widening cast": (lambda a, b: a.double(), [], []),
    "made infinite": (lambda a, b: a / b, ["op"], [INF]),
    "infinite before": (lambda a, b: a.half() + torch.where(b > 1, INF, b).half(), ["cast", "cast", "op"], [3, 1, 3]),
    "16 bits alone": (lambda a, b: a + b, [], []),
    "softmax": (lambda a, b: (a - a.amax(1, True)).exp(), [], []),
    "an exponential": (lambda a, b: (a * 100).exp(), ["op"], [INF]),
}


@pytest.mark.parametrize("name", CASES)
def test_magnitudes(name: str) -> None:
    f, kinds, magnitudes = CASES[name]
    values, found, result = recorded(f, A, B)
    assert [value.kind for value in values] == kinds
    assert found == pytest.approx(magnitudes) and torch.equal(result, f(A, B))


def test_a_product_names_its_factors_through_what_keeps_magnitudes() -> None:
    values, _, _ = recorded(lambda a, b: a.half().relu().t() @ (b.half() * 2).view(2, 2), A, B)
    assert [value.op for value in values] == ["aten._to_copy", "aten._to_copy", "aten.mul", "aten.mm"]
    assert values[-1].operands == (0, 2)
    assert {value.dtype for value in values} == {"f16"} and not any(value.backward for value in values)


def test_convolutions_sum_over_channels_and_their_window() -> None:
    values, _, _ = recorded(
        lambda x, w: torch.conv2d(x.half(), w.half()), torch.ones(1, 3, 5, 5), torch.ones(2, 3, 3, 3)
    )
    assert (values[-1].op, values[-1].operands) == ("aten.convolution", (0, 1))


def test_what_is_inserted_stands_where_its_value_does_and_isnt_marked_as_that_is() -> None:
    gm = make_fx(lambda slots, a: (a.half() / a.half(), watched(slots, False)), tracing_mode="fake")(
        torch.zeros(SLOTS), A
    )
    before = [node for node in gm.graph.nodes if node.op == "call_function"]
    for line, node in enumerate(before):
        node.meta |= {"stack_trace": f'File "theirs.py", line {line}', "nn_module_stack": {"0": ("part", nn.Module)}}
        node.meta["recompute"] = line
    run_passes([RecordMagnitudes([])], gm)
    *made, _, _ = [node for node in gm.graph.nodes if node.op == "call_function" and node not in before]  # put together
    assert len(made) > 9 and not any("recompute" in node.meta for node in made)
    assert {source_line(node) for node in made} == {f"theirs.py:{i}" for i in range(3)}
    assert {module_path(node) for node in made} == {"part"}


def test_symbolic_sizes_and_empty_tensors() -> None:
    values, found, _ = recorded(lambda a, b: (a.new_empty(0, 2).half(), b.half()), A, B)
    assert len(values) == 1 and found == [4.0]
    compiled = torch.compile(
        nn.Linear(4, 4), backend="amp", options={"watch": True, "lower": "aot_eager"}, dynamic=True
    )
    with torch.no_grad():
        assert compiled(torch.ones(5, 4)).shape == (5, 4)
