"""Ops again in high precision, and the errors, overflows and flushes to zero of known numbers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

import ampcompile
from ampcompile.insight.exact import (
    attention,
    combine,
    compute_in_high_precision,
    find_not_finite,
    is_attention,
    is_floating,
    measure,
    ratio,
    relative_error,
    rounds,
    squares,
    to_high_precision,
)
from ampcompile.insight.records import Numbers

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


aten = torch.ops.aten
FUSED = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": True}],
    ids=["plain", "causal", "scaled", "masked"],
)
def test_it_equals_the_fused_kernel(options: dict[str, Any]) -> None:
    options = dict(options)
    causal = options.pop("is_causal", False)
    query, key, value = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    if "attn_mask" in options:
        options["attn_mask"] = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    if causal:
        key, value = key[:, :, :5].contiguous(), value[:, :, :5].contiguous()
    fused = FUSED(query, key, value, 0.0, causal, **options)
    ours = attention(FUSED, (query, key, value, 0.0, causal), options, fused)
    assert ours is not None
    torch.testing.assert_close(ours[0], fused[0])
    assert ours[1] is fused[1]  # what only the fused backward reads

    grad = torch.randn_like(fused[0])
    arguments = (grad, query, key, value, *fused, 0.0, causal)
    expected = BACKWARD(*arguments, **options)
    found = attention(BACKWARD, arguments, options, expected)
    assert found is not None and len(found) == 3
    for ours_grad, fused_grad in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_grad, fused_grad)


def test_dropout_is_left_to_the_kernel() -> None:
    query = torch.randn(1, 1, 4, 8)
    assert attention(FUSED, (query, query, query, 0.5), {}, None) is None


def test_every_fused_kernel_of_torch_can_be_written_out() -> None:
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::_scaled_dot_product_")]
    packets = {n.removeprefix("aten::").partition(".")[0] for n in names} - {"_scaled_dot_product_attention_math"}
    for packet in packets - {"_scaled_dot_product_attention_math_for_mps"}:
        op = getattr(aten, packet).default
        arguments = {argument.name for argument in op._schema.arguments}
        assert is_attention(op) and {"query", "key", "value", "dropout_p", "is_causal", "scale"} <= arguments, op
        if "backward" in packet:
            assert arguments & {"grad_out", "grad_out_"}, op


HALF, WIDE = torch.float16, torch.float64


def wide(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=WIDE)


@pytest.mark.parametrize(
    ("found", "exact", "error"),
    [
        ((3.0, 4.0), (3.0, 4.0), 0.0),
        ((3.0, 4.5), (3.0, 4.0), 0.1),
        ((0.0,), (0.0,), 0.0),
        ((1.0,), (0.0,), math.inf),
        ((math.inf, 4.0), (3.0, 4.0), math.inf),
        ((math.nan, 4.0), (3.0, 4.0), math.inf),
        ((math.inf, 4.5), (1e39, 4.0), 0.125),  # float32 would be infinite, too
        ((math.nan, 4.5), (math.nan, 4.0), 0.125),
        ((3.0, 4.0), (math.nan, 4.0), math.inf),  # float64 alone
        ((3.0, 4.0), (math.inf, 4.0), math.inf),
        ((math.nan, math.inf), (math.inf, math.inf), math.nan),  # nothing to compare
        ((math.inf,), (1e39,), math.nan),
        ((), (), 0.0),
    ],
)
def test_the_error_is_a_distance_over_a_norm(found: tuple[float, ...], exact: tuple[float, ...], error: float) -> None:
    assert relative_error(torch.tensor(found), wide(*exact)) == pytest.approx(error, nan_ok=True)


def test_squares_add_up_over_tensors() -> None:
    assert squares(torch.tensor([1.0, 5.0]), wide(3.0, 4.0)) == pytest.approx((5.0, 25.0))
    assert squares(torch.tensor([math.inf]), wide(3.0)) == (math.inf, 9.0)
    assert ratio(5.0 + 4.0, 25.0 + 11.0) == 0.5


def test_what_is_seen_of_one_op() -> None:
    found = [torch.tensor([math.inf, 0.0, 8.0, -60000.0], dtype=HALF), torch.tensor([0.0, math.nan])]
    local = [wide(70000.0, 1e-9, 10.0, -60000.0), wide(0.0, 1e39)]
    exact = [wide(70000.0, 1e-9, 8.0, -60000.0), wide(0.0, 1.0)]
    seen = measure(found[:1], local[:1], None)
    assert seen == Numbers(math.inf, None, 60000.0, 0.25, 0.25, 4, not_finite=0.25)
    seen = measure(found, local, exact)
    assert (seen.local, seen.cumulative) == (math.inf, math.inf)
    assert (seen.overflowed, seen.flushed, seen.elements) == (1 / 6, 1 / 6, 6), "of all elements"
    alone = measure(found, None, exact)
    assert (alone.local, alone.overflowed, alone.flushed) == (None, 0, 0)


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("found", "exact", "lost"),
    [
        (1.0, 1.0, False),
        (NAN, NAN, True),
        (NAN, 1.0, True),
        (1.0, NAN, True),
        (NAN, INF, True),
        (INF, INF, False),  # as a mask has it
        (INF, -INF, True),
        (INF, 1e39, False),  # float32 would have it too
        (INF, 1.0, True),
        (1.0, INF, True),
        (3e38, 1e39, False),
    ],
)
def test_infinities_that_both_runs_have_are_as_they_should_be(found: float, exact: float, lost: bool) -> None:
    assert find_not_finite(torch.tensor([found, 0.0]), wide(exact, 0.0)).tolist() == [lost, False]
    assert measure([torch.tensor([found, 0.0])], None, [wide(exact, 0.0)]).not_finite == lost / 2


def test_without_a_run_in_high_precision_what_the_mixed_one_has_counts() -> None:
    assert measure([torch.tensor([NAN, INF, -INF, 1.0])], None, None).not_finite == 0.25
    assert measure([torch.tensor([NAN])], [wide(1.0)], None).not_finite == 1, "the op alone stands for it"
    numbers = torch.tensor([complex(NAN, 0), complex(INF, 0), 1j])
    assert measure([numbers], [numbers.to(torch.complex128)], None).not_finite == pytest.approx(1 / 3)


def test_the_smallest_number_that_counts_as_flushed_is_float32s() -> None:
    smallest = 2.0**-149
    for exact, flushed in ((smallest, 1.0), (-smallest, 1.0), (smallest / 2, 0.0), (0.0, 0.0)):
        assert measure([torch.zeros(1)], [wide(exact)], None).flushed == flushed


def test_together_they_have_the_worst_errors_and_shares_of_all_elements() -> None:
    first, second = Numbers(0.1, None, 3.0, 0.5, 0.0, 10), Numbers(0.3, 0.2, 2.0, 0.0, 0.2, 30)
    assert combine([first, second]) == Numbers(0.3, 0.2, 3.0, 0.125, pytest.approx(0.15), 40, ops=2)
    assert combine([Numbers(None, None, 1.0, 0.0, 0.0, 0)]) == Numbers(None, None, 1.0, 0.0, 0.0, 0)
    lost = Numbers(NAN, NAN, 0.0, 0.0, 0.0, 10, not_finite=1.0)
    both = combine([lost, second])
    assert (both.local, both.cumulative, both.not_finite) == (0.3, 0.2, 0.25)
    assert math.isnan(combine([lost]).local or 0.0)


def test_nothing_has_no_numbers() -> None:
    assert measure([torch.ones(0)], [wide()], [wide()]) == Numbers(0.0, 0.0, 0.0, 0.0, 0.0, 0)
