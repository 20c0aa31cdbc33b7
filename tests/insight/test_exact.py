"""Ops again in high precision, and the errors, overflows and flushes to zero of known numbers."""

import math

import pytest
import torch
from torch import Tensor

import ampcompile
from ampcompile.insight.exact import attention, find_not_finite, is_attention, measure, relative_error
from ampcompile.records.graphs import Numbers

aten = torch.ops.aten
LOW, HALF, HIGH, WIDE = torch.bfloat16, torch.float16, torch.float32, torch.float64
INF, NAN = math.inf, math.nan


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

    @torch.library.custom_op("audit_test::no_float64", mutates_args=())
    def no_float64(x: Tensor) -> Tensor:
        if x.dtype == WIDE:
            raise TypeError("no float64")
        return x / 3

    no_float64.register_fake(torch.empty_like)
    audit = ampcompile.audit(lambda x: torch.ops.audit_test.no_float64(x @ x))(torch.randn(4, 4))
    assert not audit.unmeasured and audit.error < 0.05, "it runs in float32"


FUSED = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.mark.parametrize("kind", ["plain", "causal", "scaled", "masked"])
def test_it_equals_the_fused_kernel(kind: str) -> None:
    causal = kind == "causal"
    query, key, value = (torch.randn(2, 3, n, 8, dtype=WIDE) for n in ((5, 5, 5) if causal else (5, 7, 7)))
    options = {"scaled": {"scale": 0.3}, "masked": {"attn_mask": torch.randn(2, 3, 5, 7, dtype=WIDE)}}.get(kind, {})
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
