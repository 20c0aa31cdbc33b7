"""`make_fx` above autocast keeps regions and composite ops, and every value has a node of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node

from ampcompile.torch_private import regions, tracing

aten = torch.ops.aten


def trace(f: Any, *inputs: Any, apart: set[Any] = frozenset()) -> GraphModule:
    return tracing.trace_pre_dispatch(f, inputs, lambda op, args, kwargs: op in apart)


def targets(gm: GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(("apart", "left"), [(set(), [aten.linear.default]), ({aten.linear.default}, None)])
def test_composite_ops_stay_whole_unless_they_are_taken_apart(apart: set[Any], left: list[Any] | None) -> None:
    x, weight, bias = torch.randn(2, 3), torch.randn(4, 3), torch.randn(4)
    gm = trace(nn.functional.linear, x, weight, bias, apart=apart)
    assert targets(gm) == left if left else aten.addmm.default in targets(gm) and aten.linear.default not in targets(gm)
    torch.testing.assert_close(gm(x, weight, bias), nn.functional.linear(x, weight, bias))


def test_an_op_that_returns_its_argument_has_a_node_and_the_argument_keeps_its_own() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.sin()
        cast = h.float()
        return cast.exp(), h.cos()

    graph = trace(f, torch.randn(3)).graph
    nodes: dict[Any, Node] = {node.target: node for node in graph.nodes}
    (cast,) = (node for target, node in nodes.items() if target in (aten.to.dtype, aten._to_copy.default))
    assert nodes[aten.cos.default].args[0] is nodes[aten.sin.default]
    assert nodes[aten.exp.default].args[0] is cast


def test_the_inputs_of_a_graph_of_dynamo_are_its_fakes_with_their_symbols() -> None:
    found: list[Any] = []

    def backend(gm: GraphModule, inputs: Any) -> Any:
        fakes, mode = tracing.fake_inputs(inputs)
        again, _ = tracing.fake_inputs(fakes)
        assert all(one is other for one, other in zip(fakes, again, strict=True))
        found.extend(fake for fake in fakes if isinstance(fake, Tensor))
        assert mode.shape_env is not None and not tracing.fakes_only()
        with tracing.computing_on(mode):
            assert tracing.fakes_only() and isinstance(torch.ones(2), FakeTensor)
        placeholders = gm.graph.find_nodes(op="placeholder")
        for fake, node in zip(fakes, placeholders, strict=True):
            assert not isinstance(fake, Tensor) or fake.shape == node.meta["example_value"].shape
        return gm.forward

    x, weight = torch.randn(5, 3), nn.Parameter(torch.randn(3))
    torch.compile(lambda x: x * weight, backend=backend, dynamic=True)(x)
    assert [type(fake) for fake in found] == [FakeTensor] * 2
    assert {tracing.is_of_fixed_layout(fake) for fake in found} == {True, False}
    assert sorted(fake.requires_grad for fake in found) == [False, True]


def test_a_user_s_hooks_see_nothing_of_what_is_computed_on_fakes() -> None:
    seen: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda saved: saved):
        with tracing.computing_on(FakeTensorMode()):
            torch.ones(3, requires_grad=True).sin()
        assert not seen
        torch.ones(3, requires_grad=True).sin()
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fakes_of_grouped_products_have_the_shape_and_dtype_of_real_ones(dtype: torch.dtype) -> None:
    tracing.let_grouped_products_be_float32()
    a, b = torch.randn(6, 16, dtype=dtype), torch.randn(2, 16, 8, dtype=dtype)
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    real = aten._grouped_mm(a, b, offsets)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor) for tensor in (a, b, offsets)]
    with mode:
        fake = aten._grouped_mm(*fakes)
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


def test_what_is_computed_untraced_or_for_real_is_in_no_graph() -> None:
    values: list[Any] = []

    def f(x: Tensor) -> Tensor:
        with tracing.untraced():
            values.append(x.exp())
        with tracing.on_real_tensors():
            values.append(torch.ones(2).tan())
        return x.sin()

    assert {aten.exp.default, aten.tan.default}.isdisjoint(targets(trace(f, torch.randn(3))))
    assert type(values[1]) is Tensor

    with FakeTensorMode():
        with tracing.on_real_tensors():
            assert type(torch.ones(2)) is Tensor
        assert isinstance(torch.ones(2), FakeTensor)


def test_calls_can_be_recorded_by_hand() -> None:
    def f(x: Tensor) -> Tensor:
        with tracing.untraced():
            value = x.clone()
        begun = tracing.record_state_change(regions.ENTER_AUTOCAST, ("cpu", None, False, None), {})
        tracing.record_state_change(regions.EXIT_AUTOCAST, (begun,), {})
        return tracing.record_call("call_function", aten.neg.default, (x,), {}, value).exp()

    gm = trace(f, FakeTensorMode().from_tensor(torch.randn(3)))
    first, second, negative, exponential = (node for node in gm.graph.nodes if node.op == "call_function")
    assert second.args == (first,) and first.meta["val"] is second.meta["val"] is None
    assert negative.target is aten.neg.default and exponential.args == (negative,)


@pytest.mark.parametrize("fake", [True, False])
def test_a_graph_s_fakes_are_computed_with_and_autocast_excluded(fake: bool) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(x)
    if fake:
        x.meta["val"] = FakeTensorMode().from_tensor(torch.ones(2, 2))
    with torch.autocast("cpu", enabled=fake), tracing.on_fakes_of(GraphModule({}, graph)):
        assert tracing.fakes_only() == fake
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.parametrize(
    ("constant", "largest"),
    [
        (torch.tensor([1.0, -3.0, float("inf"), float("nan")]), 3.0),
        (torch.tensor([3 + 4j]), 5.0),
        (torch.tensor([], dtype=torch.bfloat16), 0.0),
        (torch.tensor([float("nan")]), 0.0),
        (torch.tensor([-7]), 7.0),
    ],
)
def test_the_largest_finite_magnitude_is_found_among_fakes_too(constant: Tensor, largest: float) -> None:
    assert tracing.largest_magnitude(constant) == largest
    with FakeTensorMode():
        assert tracing.largest_magnitude(constant) == largest


def test_transforms_of_functions_are_noticed() -> None:
    told: list[bool] = []

    def f(x: Tensor) -> Tensor:
        told.append(tracing.transforms_are_active())
        return x.sin()

    torch.vmap(f)(torch.ones(2))
    f(torch.ones(2))
    assert told == [True, False]
