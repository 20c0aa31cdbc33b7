"""Coded states on the GPU's kernels: the bits of NumPy's reference, and none changed by a skipped step."""

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch

pytest.importorskip("triton")
from ampcompile.kernels import tables
from ampcompile.kernels.triton import step as steps
from tests.kernels.coded import check_coded_step, check_steps_of_24_bits, with_codes, with_remainders
from tests.kernels.test_states import BETAS, CASES, MOMENTA
from tests.kernels.triton import OTHERS
from tests.kernels.triton.test_step import STEPS, need_8_bits
from tests.scaler.cases import MATRIX_SIZES, adam_tensors, assert_equal, assert_quantized, with_quantized

pytestmark = pytest.mark.usefixtures("emulated")
SHAPES = ((5, 67), (2, 128), (3, 256), (2, 33), (0, 40), (4, 3, 4, 4), (1, 700))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tables, "CHUNK", 2 * tables.SPAN)
    monkeypatch.setattr(steps, "BLOCK", tables.SPAN)
    steps._constants.cache_clear()  # which have them
    yield
    steps._constants.cache_clear()


@pytest.mark.parametrize("is_bfloat16", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_bits_of_the_reference(name: str, is_bfloat16: bool) -> None:
    groups = (BETAS if name == "adam" else MOMENTA)[-2:]
    ours = with_codes(CASES[name][0](torch.bfloat16, groups, SHAPES), is_bfloat16, first=2**32 - 70)
    for _ in range(2):
        check_coded_step(STEPS[name], ours)
    before = deepcopy(ours)
    STEPS[name](ours, torch.tensor(torch.nan), torch.tensor(1.0), {})
    for state in ("params", "steps", *ours.STATES):
        assert_equal(getattr(ours, state), getattr(before, state))
    assert_equal(*([c and c.scales for c in each.coding] for each in (ours, before)))


def test_quantized_weights_are_written_with_coded_states(emulated: int) -> None:
    need_8_bits(emulated)
    ours = with_codes(with_quantized(adam_tensors(BETAS[:1], amsgrad=False, sizes=MATRIX_SIZES)), False)
    STEPS["adam"](ours, torch.tensor(0.3), torch.zeros(()), {})
    assert_quantized(ours.params[: len(ours.quantized)], [buffer for buffer, _ in ours.quantized.values()])


@pytest.mark.parametrize("is_bfloat16", [False, True])
def test_remainders_are_kept_with_coded_states(is_bfloat16: bool) -> None:
    wide = with_codes(CASES["adam"][0](groups=BETAS[:1], shapes=SHAPES), is_bfloat16)
    wide.copies = [None] * len(wide.params)
    ours = with_remainders(wide)
    for _ in range(2):
        STEPS["adam"](ours)
        STEPS["adam"](wide)
    expected = with_remainders(wide)
    for name in ("params", "kept", "checksums", "steps", *ours.STATES):
        assert_equal(getattr(ours, name), getattr(expected, name))


@pytest.mark.parametrize(("name", "is_bfloat16"), [("adam", False), ("sgd", None)])
def test_masters_of_24_bits_are_rounded_at_random(name: str, is_bfloat16: bool | None) -> None:
    groups = (BETAS if name == "adam" else MOMENTA)[-1:]
    tensors = CASES[name][0](torch.bfloat16, groups, SHAPES)
    check_steps_of_24_bits(STEPS[name], tensors if is_bfloat16 is None else with_codes(tensors, is_bfloat16))


@pytest.mark.ci
@pytest.mark.parametrize("emulated", OTHERS, ids=str, indirect=True)
def test_other_generations_have_the_bits_too(emulated: int) -> None:
    test_a_step_has_the_bits_of_the_reference("adam", False)
