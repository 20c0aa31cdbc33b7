"""Ops again in high precision: operands in high precision, dtypes replaced, results laid out as the mixed ones."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

import ampcompile
from ampcompile.auditing.high_precision import compute_in_high_precision, is_floating, rounds, to_high_precision

aten = torch.ops.aten
LOW, HALF, HIGH, WIDE = torch.bfloat16, torch.float16, torch.float32, torch.float64


def node(target: Any) -> Node:
    return Graph().call_function(target)


def run_high(target: Any, *args: Any, dtype: torch.dtype = WIDE, **kwargs: Any) -> tuple[Any, Any]:
    """The result of an op, and that in high precision."""
    mixed = target(*args, **kwargs)
    return mixed, compute_in_high_precision(node(target), args, kwargs, mixed, dtype)


def test_every_floating_and_complex_tensor_is_raised_and_nothing_else() -> None:
    found = to_high_precision(
        {"a": [torch.ones(2, dtype=HALF), 1.5], "b": (torch.ones(2).cfloat(), torch.ones(2).int())}, WIDE
    )
    assert (found["a"][0].dtype, found["a"][1]) == (WIDE, 1.5)
    assert [value.dtype for value in found["b"]] == [torch.complex128, torch.int32]


@pytest.mark.parametrize("name", ["_to_copy", "mm", "mm.dtype", "_softmax"])
def test_an_op_that_is_asked_for_a_dtype_computes_in_the_high_one(name: str) -> None:
    x, y = torch.randn(3, 4).to(LOW), torch.randn(4, 5).to(LOW)
    target, args, kwargs, mixed, exact = {
        "_to_copy": (aten._to_copy.default, (x,), {"dtype": LOW}, x, x.double()),
        "mm": (aten.mm.default, (x, y), {}, x @ y, x.double() @ y.double()),
        "mm.dtype": (aten.mm.dtype, (x, y, HIGH), {}, (x @ y).float(), x.double() @ y.double()),  # CPUs lack it
        "_softmax": (aten._softmax.default, (x.half(), -1, True), {}, x.softmax(-1).float(), x.double().softmax(-1)),
    }[name]
    found = compute_in_high_precision(node(target), args, kwargs, mixed, WIDE)
    assert found.dtype == WIDE
    torch.testing.assert_close(found, exact)


def test_dropout_takes_the_mask_that_was_drawn() -> None:
    x = torch.randn(50)
    mixed, (found, mask) = run_high(aten.native_dropout.default, x, 0.5, True)
    assert mask is mixed[1]
    torch.testing.assert_close(found, x.double() * mask * 2)
    for p, training, drawn, exact in ((0.5, False, x > -99, x.double()), (1.0, True, x < -99, 0 * x.double())):
        args = (x, p, training)
        found = compute_in_high_precision(node(aten.native_dropout.default), args, {}, (x * drawn, drawn), WIDE)
        torch.testing.assert_close(found[0], exact)


def test_what_draws_or_reads_bits_has_no_second_run() -> None:
    x = torch.ones(4)
    assert run_high(aten.rand_like.default, x)[1] is None
    assert run_high(aten.view.dtype, x, torch.int32)[1] is None


def test_an_op_that_knows_no_float64_runs_in_float32_or_not_at_all() -> None:
    knows: set[torch.dtype] = {LOW, HIGH}
    asked: list[torch.dtype] = []

    def op(x: Tensor) -> Tensor:
        asked.append(x.dtype)
        if x.dtype not in knows:
            raise TypeError(f"{x.dtype} is not among {knows}")
        return x / 3

    x = torch.ones(2, dtype=LOW)
    found = compute_in_high_precision(node(op), (x,), {}, op(x), WIDE)
    assert found.dtype == WIDE and torch.equal(found, (x.float() / 3).double())
    knows.discard(HIGH)
    assert compute_in_high_precision(node(op), (x,), {}, x, WIDE) is None
    assert asked == [LOW, WIDE, HIGH, WIDE, HIGH]


def test_an_error_of_memory_goes_through() -> None:
    def op(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no more")

    with pytest.raises(torch.OutOfMemoryError):
        compute_in_high_precision(node(op), (torch.ones(1),), {}, torch.ones(1), WIDE)


def test_results_have_the_strides_of_the_mixed_run_and_no_other_shape() -> None:
    x, mixed = torch.randn(3, 4), torch.randn(4, 3).t()
    identity = node(lambda x: x)
    found = compute_in_high_precision(identity, (x,), {}, mixed, WIDE)
    assert found.stride() == mixed.stride() and torch.equal(found, x.double())
    assert compute_in_high_precision(identity, (x,), {}, torch.randn(4, 3), WIDE) is None
    assert compute_in_high_precision(identity, ([x, 5],), {}, [x, 7], WIDE)[1] == 7, (
        "sizes and numbers are the mixed run's"
    )
    assert compute_in_high_precision(identity, ([x, x],), {}, x, WIDE) is None


def test_bodies_of_higher_order_ops_are_copied_with_their_dtypes_replaced() -> None:
    graph = Graph()
    value = graph.call_function(aten._to_copy.default, (graph.placeholder("x"),), {"dtype": LOW})
    graph.output(graph.call_function(aten.mul.Tensor, (value, graph.get_attr("third"))))
    body = GraphModule({"third": torch.tensor(1 / 3, dtype=LOW)}, graph)
    x = torch.randn(3)
    found = compute_in_high_precision(node(lambda body, x: body(x)), (body, x), {}, body(x), WIDE)
    torch.testing.assert_close(found, x.double() * torch.tensor(1 / 3, dtype=LOW).double())
    assert body(x).dtype == LOW, "the mixed run's own is as it was"


def test_views_copies_and_integers_round_nothing() -> None:
    x = torch.ones(2, 2)
    for target in (aten.add.Tensor, aten._to_copy.default, torch.ops.higher_order.cond):
        assert rounds(node(target), x)
    for target in (aten.view.default, aten.t.default, aten.clone.default, aten._unsafe_view.default, max):
        assert not rounds(node(target), x)
    assert not rounds(node(aten.add.Tensor), x.int()) and rounds(node(aten.add.Tensor), (x.int(), x))
    assert is_floating(x.cfloat()) and not is_floating(x.bool()) and not is_floating(1.0)


def test_an_op_that_knows_no_float64_is_named() -> None:
    @torch.library.custom_op("audit_test::low_only", mutates_args=())
    def low_only(x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16:
            raise TypeError("bfloat16 only")
        return x * 2

    low_only.register_fake(torch.empty_like)

    def f(x: Tensor) -> Tensor:
        return torch.ops.audit_test.low_only(x @ x) @ x

    audit = ampcompile.audit(f)(torch.randn(4, 4))
    assert audit.unmeasured == ["audit_test.low_only"]
    assert audit.error < 0.05
    assert "not run in high precision: audit_test.low_only" in str(audit)
