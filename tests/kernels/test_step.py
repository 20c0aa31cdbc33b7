"""What a step reads of its tensors, built once for the same ones; and what every optimizer's step does alike."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from ampcompile.kernels.adam import AdamGroup, adam_
from tests.kernels.engines import Engine
from tests.kernels.references import adam_reference_
from tests.pairs import pairs
from tests.scaler.cases import (
    ADAM_GROUPS,
    GRAD_DTYPES,
    HOWS,
    MATRIX_SIZES,
    OPTIMIZERS,
    adam_tensors,
    assert_close,
    assert_equal,
    assert_quantized,
    with_masters,
    with_quantized,
)


def state_of(tensors: Any) -> dict[str, Any]:
    """The lists of tensors that a step may write, copies aside, and the gradients, which it may not."""
    return {name: held for name, held in vars(tensors).items() if name not in ("groups", "copies", "group_of")}


def assert_copies_follow(tensors: Any) -> None:
    for param, copy in zip(tensors.params, tensors.copies, strict=True):
        assert copy is None or torch.equal(copy, param.to(copy.dtype))


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_several_groups_gradient_types_and_copies_equal_plain_torch(
    name: str, dtype: torch.dtype, engine: Engine
) -> None:
    make, groups, step, reference_step = OPTIMIZERS[name]
    ours = make(groups, dtype, sizes=engine.sizes)
    reference, grads, workspace = deepcopy(ours), deepcopy(ours.grads), {}
    for multiplier, found_inf in ((torch.tensor(0.3), torch.zeros(())), (None, None)):
        step(ours, multiplier, found_inf, workspace)
        reference_step(reference, multiplier)
    for kind, held in state_of(ours).items():
        assert_close(held, getattr(reference, kind))
    assert_equal(ours.grads, grads)
    assert_copies_follow(ours)


@pytest.mark.parametrize("found_inf", [1.0, 2.0, -1.0, torch.nan])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_nothing_but_stale_copies(name: str, found_inf: float, engine: Engine) -> None:
    make, groups, *steps = OPTIMIZERS[name]
    ours = make(groups, sizes=engine.sizes)
    ours.grads[3].fill_(torch.nan)
    before = deepcopy(ours)
    for step in steps:
        step(ours, torch.tensor(torch.nan), torch.tensor(found_inf))
        for kind, held in state_of(ours).items():
            assert_equal(held, getattr(before, kind))
        assert_copies_follow(ours)
        for copy in ours.copies:
            if copy is not None:
                copy.fill_(torch.nan)


@pytest.mark.parametrize(("name", "how", "found_inf"), pairs([*OPTIMIZERS], [None, *HOWS], [None, 0.0, 1.0]), ids=str)
def test_quantized_weights_are_as_if_quantized_anew(name: str, how: Any, found_inf: Any, engine: Engine) -> None:
    """Some outgrew their scale, or shrank; again by small steps, which leave most at theirs."""
    engine.need_8_bits()
    make, groups, *steps = OPTIMIZERS[name]
    for step in steps:
        ours, workspace = make(groups, sizes=MATRIX_SIZES), {}
        ours = with_quantized(ours if how is None else with_masters(ours, *how))
        before, buffers = deepcopy(ours.params), [buffer for buffer, _ in ours.quantized.values()]
        for factor in (0.3, 1e-3):
            flag = None if found_inf is None else torch.tensor(found_inf)
            step(ours, torch.tensor(factor), flag, *([workspace] if step is steps[0] else []))
            assert_quantized(ours.params[: len(buffers)], buffers)
            assert how is not None or torch.equal(ours.copies[7], ours.params[7].to(ours.copies[7].dtype))
        assert torch.equal(ours.params[6], before[6]) == bool(found_inf)


# Adam alone


@pytest.mark.parametrize("step", [adam_, adam_reference_])
def test_without_memory_the_mean_is_the_gradient_itself(step, engine):
    """torch's lerp is exact where it ends: means that were large leave nothing behind."""
    ours = adam_tensors([AdamGroup(0.01, 0.0, 0.0, 1e-3, 0.0, True, False)], sizes=engine.sizes)
    for mean in ours.exp_avgs:
        mean.mul_(1e6)
    step(ours)
    assert_equal(ours.exp_avgs, ours.grads)


def test_nan_reaches_the_largest_square_as_in_torch(engine):
    ours = adam_tensors(ADAM_GROUPS[:1], sizes=engine.sizes)
    for grad in ours.grads:
        grad.fill_(torch.nan)
    adam_(ours)
    for name in ("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
        assert all(tensor is None or tensor.isnan().all() for tensor in getattr(ours, name))


def test_a_thousandth_step_is_corrected_as_in_double(engine):
    ours = adam_tensors(ADAM_GROUPS[:1], sizes=engine.sizes)
    for step in ours.steps:
        step.fill_(1e6)
    reference = deepcopy(ours)
    adam_(ours)
    adam_reference_(reference)
    assert_close(ours.params, reference.params)
    assert all(step.item() == 1e6 + 1 for step in ours.steps)
