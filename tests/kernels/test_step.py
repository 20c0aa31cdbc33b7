"""What a step reads of its tensors, built once for the same ones; and what every optimizer's step does alike."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from ampcompile.kernels.adam import AdamGroup, adam_, adam_reference_
from ampcompile.kernels.native import group_values
from ampcompile.kernels.sgd import SgdGroup, sgd_, sgd_reference_
from ampcompile.kernels.step import kinds_of, table_of, take_copies
from tests.kernels.test_adam import GROUPS as ADAM_GROUPS
from tests.kernels.test_masters import HOWS
from tests.kernels.test_sgd import GROUPS as SGD_GROUPS
from tests.scaler.cases import (
    GRAD_DTYPES,
    MATRIX_SIZES,
    adam_tensors,
    assert_close,
    assert_equal,
    assert_quantized,
    sgd_tensors,
    with_masters,
    with_quantized,
)

GROUPS = [AdamGroup(0.01, 0.9, 0.99, 1e-3, 0.1, True, False)]


def test_the_table_says_where_everything_lies() -> None:
    tensors = adam_tensors(GROUPS, torch.float16, sizes=(3, 5))
    tensors.copies = [None, torch.empty(5, dtype=torch.bfloat16), None]
    table = table_of(tensors)
    assert table.grads.numels.tolist() == [3, 5, 63] and table.group_of.tolist() == [0, 0, 0]
    grads, params, means, squares, peaks, steps, copies, checksums, *_ = table.addresses
    for row, those in ((grads, tensors.grads), (params, tensors.params), (steps, tensors.steps)):
        assert row.tolist() == [tensor.data_ptr() for tensor in those]
    assert means[1] == tensors.exp_avgs[1].data_ptr() and squares[1] == tensors.exp_avg_sqs[1].data_ptr()
    assert peaks[0] == 0 != peaks[1] and copies.tolist() == [0, tensors.copies[1].data_ptr(), 0]
    assert not checksums.any()
    kinds = [(*kind, chosen.tolist()) for *kind, chosen in kinds_of(table)]
    usual = torch.float16, torch.float32, torch.bfloat16
    assert kinds == [(*usual, False, [0]), (*usual, True, [1, 2])], "one without a copy goes with the others"


def test_copies_change_from_step_to_step() -> None:
    tensors = adam_tensors(GROUPS, sizes=(3, 5))
    tensors.copies = [None] * 3
    table, copy = table_of(tensors), torch.empty(5, dtype=torch.float16)
    take_copies(table, {1: copy})
    assert table.addresses[6].tolist() == [0, copy.data_ptr(), 0] and table.codes[2].tolist() == [0, 1, 0]
    assert {kind.beside for kind in kinds_of(table)} == {torch.float16}
    take_copies(table, {2: copy.bfloat16()})
    assert (table.addresses[6] != 0).tolist() == [False, False, True] and table.codes[2].tolist() == [0, 0, 2]
    take_copies(table, {})
    assert not table.addresses[6].any() and {kind.beside for kind in kinds_of(table)} == {None}


def test_what_keeps_the_precision_of_16_bit_parameters_is_beside_them() -> None:
    tensors = adam_tensors(GROUPS, sizes=(3, 5, 200))
    tensors.copies[0] = torch.empty(3, dtype=torch.float16)
    masters = with_masters(tensors, "remainder")
    masters.params[0], masters.kept[0], masters.checksums[0] = tensors.params[0], None, None
    masters.copies[0] = tensors.copies[0]
    table = table_of(masters)
    assert table.addresses[6].tolist() == [t.data_ptr() for t in (tensors.copies[0], *masters.kept[1:])]
    assert table.addresses[7].tolist() == [0, *(t.data_ptr() for t in masters.checksums[1:])]
    assert {(kind.param, kind.beside): kind.chosen.tolist() for kind in kinds_of(table) if kind.has_state} == {
        (torch.bfloat16, torch.int16): [1, 2]
    }


def test_settings_may_be_tensors_and_the_learning_rate_one_on_a_gpu() -> None:
    groups = [
        SgdGroup(0.1, torch.tensor(0.5), 0.0, False, 0.25, True),
        SgdGroup(torch.tensor(9.0), 1, 0, True, 0, False),
    ]
    assert group_values(groups).tolist() == [[0.1, 0.5, 0, 0, 0.25, 1], [0, 1, 0, 1, 0, 0]]


OPTIMIZERS: dict[str, Any] = {
    "adam": (adam_tensors, ADAM_GROUPS, adam_, adam_reference_),
    "sgd": (sgd_tensors, SGD_GROUPS, sgd_, sgd_reference_),
}


def state_of(tensors: Any) -> dict[str, Any]:
    """The lists of tensors that a step may write, copies aside, and the gradients, which it may not."""
    return {name: held for name, held in vars(tensors).items() if name not in ("groups", "copies", "group_of")}


def assert_copies_follow(tensors: Any) -> None:
    for param, copy in zip(tensors.params, tensors.copies, strict=True):
        assert copy is None or torch.equal(copy, param.to(copy.dtype))


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_several_groups_gradient_types_and_copies_equal_plain_torch(name: str, dtype: torch.dtype) -> None:
    make, groups, step, reference_step = OPTIMIZERS[name]
    ours = make(groups, dtype)
    reference, grads = deepcopy(ours), deepcopy(ours.grads)
    step(ours, torch.tensor(0.3))
    reference_step(reference, torch.tensor(0.3))
    for kind, held in state_of(ours).items():
        assert_close(held, getattr(reference, kind))
    assert_equal(ours.grads, grads)
    assert_copies_follow(ours)


@pytest.mark.parametrize("found_inf", [1.0, 2.0, -1.0, torch.nan])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_nothing_but_stale_copies(name: str, found_inf: float) -> None:
    make, groups, *steps = OPTIMIZERS[name]
    ours = make(groups)
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


@pytest.mark.parametrize("how", [None, *HOWS], ids=str)
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_quantized_weights_are_as_if_quantized_anew(name: str, found_inf: float, how: Any) -> None:
    make, groups, *steps = OPTIMIZERS[name]
    for step in steps:
        ours = make(groups, sizes=MATRIX_SIZES)
        ours = with_quantized(ours if how is None else with_masters(ours, *how))
        before, buffers = deepcopy(ours.params), [buffer for buffer, _ in ours.quantized.values()]
        step(ours, torch.tensor(0.3), torch.tensor(found_inf))
        assert_quantized(ours.params[: len(buffers)], buffers)
        assert torch.equal(ours.params[6], before[6]) == bool(found_inf)
