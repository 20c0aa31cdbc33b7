"""The step and the copies of weights: what a fused step writes needs no cast, and no stale copy passes for fresh."""

import math
import operator

import pytest
import torch
from torch import nn

from ampcompile import weights
from ampcompile.optim.plan import Plan
from ampcompile.weights.step import QUANTIZED
from tests.scaler.cases import assert_equal, assert_quantized, fill, scaled
from tests.weights.bindings import bind
from tests.weights.writers import unseen

KINDS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}


def made(dtypes=(torch.bfloat16, torch.float16)):
    """Parameters, and a binding that reads each in each type."""
    params = [nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(3, 5).t())]
    slots = [param for param in params for _ in dtypes]
    return params, slots, bind(list(dtypes) * len(params))


def addresses(copies) -> list[int]:
    """Where the copies are; a test that kept the list itself would pass for a backward that waits for them."""
    return [copy.data_ptr() for copy in copies]


def assert_fresh(slots, copies) -> None:
    assert_equal(copies, [slot.detach().to(copy.dtype) for slot, copy in zip(slots, copies, strict=True)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("enabled", [True, False])
def test_after_a_fused_step_nothing_is_cast(kind, enabled):
    params, slots, binding = made((torch.bfloat16,))
    before = addresses(binding.copies(slots))
    optimizer, scaler = KINDS[kind](params), scaled(enabled=enabled)
    casts = weights.weight_stats().casts
    for step, bad in enumerate((None, math.inf if enabled else None, None)):
        fill(params, step, bad=bad)
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert addresses(binding.copies(slots)) == before
        assert weights.weight_stats().casts == casts
        assert_fresh(slots, binding.copies(slots))


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("writes", [False, True])
def test_a_fused_step_that_fails_costs_one_cast(error, writes, monkeypatch):
    params, slots, binding = made()
    binding.copies(slots)
    optimizer, scaler = KINDS["SGD"](params), scaled()
    known = Plan.run.__globals__["step_"]

    def fail(*args):
        if writes:
            known(*args)
        raise error

    with monkeypatch.context() as patch:
        patch.setitem(Plan.run.__globals__, "step_", fail)
        for step in range(2):
            fill(params, step)
            with pytest.raises(error) as held:  # whose frames hold what the step had taken
                scaler.step(optimizer)
            scaler.update()
    assert_fresh(slots, binding.copies(slots))
    casts = weights.weight_stats().casts
    for _ in range(3):
        assert_fresh(slots, binding.copies(slots))
    assert weights.weight_stats().casts == casts, held


@pytest.mark.parametrize("kind", KINDS)
def test_copies_in_both_types_are_right_after_a_write_without_a_trace_and_a_skipped_step(kind):
    params, slots, binding = made()
    slots, binding = slots[:3], bind([torch.bfloat16, torch.float16, torch.float16])  # none of the last weight
    versions = [copy._version for copy in binding.copies(slots)]
    optimizer, scaler = KINDS[kind](params), scaled()
    casts = weights.weight_stats().casts
    for step, bad in enumerate((None, None, math.inf, None)):
        fill(params, step, bad=bad)
        if step:
            unseen(params[0])[3, 3] = 0.3 + step
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step_skipped.item() == (bad is not None)
        before, versions = versions, [copy._version for copy in binding.copies(slots)]
        assert all(map(operator.gt, versions, before)) and (step or weights.weight_stats().casts == casts)
        assert_fresh(slots, binding.copies(slots))


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_copies_are_written_too_beside_16_bit_ones_and_whatever_was_written_unseen(kind):
    params = [nn.Parameter(torch.randn(32, 48)), nn.Parameter(torch.randn(16, 32).t())]
    slots, binding = [param for param in params for _ in range(2)], bind([torch.bfloat16, QUANTIZED.dtype] * 2)
    before = addresses(binding.copies(slots))
    optimizer, scaler = KINDS[kind](params), scaled()
    casts = weights.weight_stats().casts
    for step, bad in enumerate((None, math.inf, None, math.inf)):
        fill(params, step, bad=bad)
        if step > 1:
            for param in params:
                unseen(param)[3, 3] = 10.0**step
        scaler.step(optimizer)
        scaler.update()
        assert step > 1 or weights.weight_stats().casts == casts
        copies = binding.copies(slots)
        assert_quantized([param.detach() for param in params], copies[1::2])
        assert_fresh(params, copies[::2])
        assert step > 1 or addresses(copies) == before
        del copies


def test_a_copy_that_a_backward_waits_for_is_left_alone():
    params, slots, binding = made((torch.bfloat16,))
    optimizer, scaler = torch.optim.SGD(params, lr=0.1), scaled()
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    copy = binding.copies(slots)[0]
    out = x @ copy
    old = copy.clone()
    del copy
    fill(params, 0)
    scaler.step(optimizer)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert_equal([grad], [old.sum(1).expand_as(x)])
    assert_fresh(slots, binding.copies(slots))


def test_weights_outside_of_the_optimizer_stay_as_they_were():
    params, slots, binding = made((torch.bfloat16,))
    binding.copies(slots)
    others, other_slots, other_binding = made((torch.bfloat16,))
    other_binding.copies(other_slots)
    optimizers = [torch.optim.AdamW(params), torch.optim.SGD(others, lr=0.1)]
    scaler, casts = scaled(), weights.weight_stats().casts
    fill([*params, *others], 0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    for each, group in ((binding, slots), (other_binding, other_slots)):
        assert_fresh(group, each.copies(group))
    assert weights.weight_stats().casts == casts


def test_the_generic_path_leaves_casting_to_the_next_call():
    params, slots, binding = made((torch.bfloat16,))
    binding.copies(slots)
    optimizer, scaler = torch.optim.RMSprop(params, lr=0.1), scaled()
    fill(params, 0)
    scaler.step(optimizer)
    assert_fresh(slots, binding.copies(slots))
