"""Coded states: codes repeat, steps have the bits of plain torch, and what is lost in a step doesn't add up."""

from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ampcompile.kernels.adam import AdamGroup, AdamTensors, adam_
from ampcompile.kernels.sgd import SgdGroup, SgdTensors, sgd_
from ampcompile.kernels.states import Coding, Rounding, blocks_of, decode, encode, key_of, random_words
from tests.kernels.coded import (
    SHAPES,
    SMALL,
    check_coded_step,
    check_steps_of_24_bits,
    decoded,
    in_rows,
    moments_of,
    with_codes,
    with_remainders,
)
from tests.kernels.engines import Engine
from tests.scaler.cases import (
    ADAM_GROUPS,
    GRAD_DTYPES,
    MATRIX_SIZES,
    SGD_GROUPS,
    adam_tensors,
    assert_equal,
    assert_quantized,
    with_quantized,
)

BETAS = [
    *(group for group in ADAM_GROUPS if group.beta1),
    AdamGroup(0.01, 0.995, 0.9999, 1e-8, 0.1, True, False),
]
MOMENTA = [*SGD_GROUPS, SgdGroup(0.1, 0.999, 0.0, False, 0.0, False)]


def drawn(shape: tuple[int, ...], decades: float = 1.0) -> Tensor:
    return torch.randn(shape) * 10 ** (decades * torch.randn(shape))


def adam_case(grad_dtype: torch.dtype = torch.float32, groups: Any = BETAS, shapes: Any = SHAPES) -> AdamTensors:
    n = len(shapes)
    return AdamTensors(
        groups,
        params=[drawn(shape) for shape in shapes],
        grads=[torch.randn(shape).to(grad_dtype) for shape in shapes],
        exp_avgs=[drawn(shape) for shape in shapes],
        exp_avg_sqs=[drawn(shape).square() for shape in shapes],
        max_exp_avg_sqs=[None] * n,
        steps=[torch.tensor(float(i)) for i in range(n)],
        copies=[torch.zeros(shape, dtype=torch.bfloat16) if i % 2 else None for i, shape in enumerate(shapes)],
        group_of=[i % len(groups) for i in range(n)],
    )


def sgd_case(grad_dtype: torch.dtype = torch.float32, groups: Any = MOMENTA, shapes: Any = SHAPES) -> SgdTensors:
    n = len(shapes)
    group_of = [i % len(groups) for i in range(n)]
    return SgdTensors(
        groups,
        params=[drawn(shape) for shape in shapes],
        grads=[torch.randn(shape).to(grad_dtype) for shape in shapes],
        momentum_buffers=[
            drawn(shape) if groups[g].momentum else None for g, shape in zip(group_of, shapes, strict=True)
        ],
        copies=[torch.zeros(shape, dtype=torch.bfloat16) if i % 2 else None for i, shape in enumerate(shapes)],
        group_of=group_of,
    )


CASES = {"adam": (adam_case, adam_), "sgd": (sgd_case, sgd_)}


def float32s(count: int) -> Tensor:
    """Of all exponents, in blocks of 64 whose numbers differ by up to some decades."""
    exponents = torch.randint(-149, 128, (count, 1)) + torch.randn(count, 64) * torch.rand(count, 1) * 20
    return torch.randn(count, 64) * torch.exp2(exponents.clamp(-149, 124))


@pytest.mark.parametrize("moment", [0, 1])
def test_codes_to_nearest_repeat(moment: int) -> None:
    values = float32s(20000) if moment == 0 else float32s(20000).abs()
    codes = torch.empty(values.shape, dtype=torch.uint8 if moment else torch.int8)
    scales = torch.empty(blocks_of(*values.shape))
    encode(moment, values, codes, scales)
    decode(moment, codes, scales, back := torch.empty_like(values))
    again, same = torch.empty_like(codes), torch.empty_like(scales)
    encode(moment, back, again, same)
    assert torch.equal(again, codes) and torch.equal(same, scales)
    assert codes.unique().numel() > 250 - 100 * (moment == 0)
    largest, kept = values.abs().amax(1), scales[::2] != 0
    assert_equal([back.abs().amax(1)[kept]], [(_root(largest).square() if moment else largest)[kept]])


def _root(x: Tensor) -> Tensor:
    return x.double().sqrt().float()


def drawn_for(engine: Engine, name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A case with fewer groups and smaller tensors where an emulator computes."""
    groups = BETAS if name == "adam" else MOMENTA
    small = (groups[-2:], SMALL) if engine.capability else (groups, SHAPES)
    return CASES[name][0](dtype, *small)


on_engines = pytest.mark.parametrize(
    ("name", "is_bfloat16", "engine"), list(product(CASES, [False, True], [0, 90])), indirect=["engine"]
)


@on_engines
def test_a_step_has_the_bits_of_the_reference(name: str, is_bfloat16: bool, engine: Engine) -> None:
    for dtype in GRAD_DTYPES[2 * bool(engine.capability) :]:
        ours = with_codes(drawn_for(engine, name, dtype), is_bfloat16, first=2**32 - 70)
        for _ in range(2):
            check_coded_step(CASES[name][1], ours)


@pytest.mark.parametrize("name", CASES)
def test_numbers_between_two_codes_have_the_bits_of_the_reference(name: str) -> None:
    """The kernels code a block by fewer roundings where those can't count."""
    make, step = CASES[name]
    group = (
        SgdGroup(0.1, 0.9, 0.0, False, 0.0, False) if name == "sgd" else AdamGroup(0.1, 0.9, 0.5, 1e-8, 0, True, False)
    )
    ours = make(groups=[group], shapes=[(2000, 64)])
    for moment in moments_of(ours):
        getattr(ours, moment)[0].zero_()
    ours = with_codes(ours, False)
    code = torch.randint(127 if name == "sgd" else 254, (2000, 64)).double()
    words = random_words(1, Rounding(0, key_of(7, 0), 1, False), 0, 128000, torch.device("cpu"))
    chance = (words >> 8).double() / 2.0**24
    ratio = (code + 0.5) / (253.5 - code) if name == "sgd" else (code + chance.view(2000, 64)) / 255
    ratio[:, 7] = 1
    signs = torch.randint(2, ratio.shape) * 2 - 1
    ours.grads[0] = (ratio * signs * torch.rand(2000, 1) * (1 + 1e-7 * torch.randn(ratio.shape))).float()
    check_coded_step(step, ours, multiplier=1.0)


@pytest.mark.parametrize("name", CASES)
def test_bursts_and_faint_blocks_have_the_bits_of_the_reference(name: str) -> None:
    """Second moments beside one that grew keep a code above 0; scales have a least size."""
    make, step = CASES[name]
    adam, sgd = AdamGroup(0.01, 0.1, 0.01, 1e-8, 0.0, True, False), SgdGroup(0.1, 0.1, 0.0, False, 0.0, False)
    ours = make(groups=[adam if name == "adam" else sgd], shapes=[(40, 512)] * 2)
    for moment, decade in zip(moments_of(ours), (-40, -42), strict=False):
        getattr(ours, moment)[0].mul_(torch.logspace(decade, decade + 8, 40)[:, None])
    ours.grads[0].zero_()
    ours.grads[1][:, ::64] *= 1e4
    check_coded_step(step, with_codes(ours, False))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("name", "is_bfloat16"), list(product(CASES, [False, True])))
def test_remainders_are_kept_with_coded_states(name: str, is_bfloat16: bool, threads: int, engine: Engine) -> None:
    step, wide = CASES[name][1], with_codes(drawn_for(engine, name), is_bfloat16)
    wide.copies = [None] * len(wide.params)
    ours = with_remainders(wide)
    torch.set_num_threads(threads)
    for _ in range(2):
        step(ours)
        step(wide)
    torch.set_num_threads(1)
    for state in ("steps", *ours.STATES):
        assert_equal(getattr(ours, state), getattr(wide, state))
    expected = with_remainders(wide)
    for name in ("params", "kept", "checksums"):
        assert_equal(getattr(ours, name), getattr(expected, name))


@pytest.mark.parametrize(("name", "is_bfloat16"), list(product(CASES, [False, True, None])))
def test_masters_of_24_bits_are_rounded_at_random(name: str, is_bfloat16: bool | None, engine: Engine) -> None:
    """Beside codes, bfloat16 and float32 states; large and infinite weights and NaN too."""
    step, tensors = CASES[name][1], drawn_for(engine, name)
    tensors.params[0].view(-1)[:4] = torch.tensor([3.3895e38, -3.4028e38, torch.inf, torch.nan])
    for state in (state for state in tensors.STATES if state != "steps"):
        for i in (0, 2):
            if getattr(tensors, state)[i] is not None:
                getattr(tensors, state)[i].zero_()
                tensors.grads[i].zero_()
    check_steps_of_24_bits(step, tensors if is_bfloat16 is None else with_codes(tensors, is_bfloat16))


@on_engines
def test_a_skipped_step_changes_no_byte(name: str, is_bfloat16: bool, engine: Engine) -> None:
    step, ours = CASES[name][1], with_codes(drawn_for(engine, name), is_bfloat16)
    before = deepcopy(ours)
    step(ours, torch.tensor(torch.nan), torch.tensor(1.0))
    for state in ("params", "steps", *ours.STATES):
        assert_equal(getattr(ours, state), getattr(before, state))
    scales = [[c and c.scales for c in each.coding] for each in (ours, before)]
    assert_equal(*scales)


def test_quantized_weights_are_written_with_coded_states(engine: Engine) -> None:
    engine.need_8_bits()
    ours = with_codes(with_quantized(adam_tensors(BETAS[:1], amsgrad=False, sizes=MATRIX_SIZES)), False)
    adam_(ours, torch.tensor(0.3), torch.zeros(()))
    assert_quantized(ours.params[: len(ours.quantized)], [buffer for buffer, _ in ours.quantized.values()])


def test_without_gradients_states_decay_to_zero_as_float32s_do() -> None:
    group = AdamGroup(0.0, 0.5, 0.9, 1e-8, 0.0, True, False)
    ours = with_codes(adam_case(groups=[group], shapes=[(40, 200)]), False)
    exact = decoded(ours)
    ours.grads[0].zero_()
    exact.grads[0].zero_()
    for _ in range(40):
        adam_(ours)
        adam_(exact)
    now = decoded(ours)
    size = exact.exp_avg_sqs[0].sum() / now.exp_avg_sqs[0].sum()
    assert abs(size - 1) < 0.02 and now.exp_avg_sqs[0].min() > 0
    for _ in range(2000):
        adam_(ours)
    assert not ours.exp_avgs[0].any() and not ours.exp_avg_sqs[0].any() and not ours.coding[0].scales.any()


def test_an_infinite_gradient_spoils_its_element_alone() -> None:
    group = AdamGroup(0.01, 0.9, 0.999, 1e-8, 0.0, True, False)
    ours = with_codes(adam_case(groups=[group], shapes=[(4, 128)]), False)
    ours.grads[0][1, 70] = torch.inf
    check_coded_step(adam_, ours)
    after = decoded(ours)
    assert ours.params[0].isnan().sum() == 1 and ours.params[0][1, 70].isnan()
    for state in (after.exp_avgs[0], after.exp_avg_sqs[0]):
        assert state.isfinite().all() and state[1, 70] == state[1, 64:].abs().max()


def test_blocks_of_one_row_may_differ_by_any_magnitude() -> None:
    values = torch.full((2, 192), 1.0)
    values[:, :64], values[:, 64:128] = 1e-30, 1e30
    for moment in (0, 1):
        codes, scales = (
            torch.empty(values.shape).to(torch.uint8 if moment else torch.int8),
            torch.empty(blocks_of(2, 192)),
        )
        encode(moment, values, codes, scales)
        decode(moment, codes, scales, back := torch.empty_like(values))
        torch.testing.assert_close(back, values, rtol=1e-6, atol=0)


def test_rounding_at_random_is_right_on_average_in_each_step_anew() -> None:
    """A second moment that decays by a thousandth keeps its size; with the same bits in each step it would stay."""
    group = AdamGroup(0.0, 0.9, 0.999, 1e-8, 0.0, True, False)
    for is_bfloat16 in (False, True):
        ours = with_codes(adam_case(groups=[group], shapes=[(64, 512)]), is_bfloat16)
        ours.grads[0].zero_()
        start = decoded(ours).exp_avg_sqs[0]
        for _ in range(300):
            adam_(ours)
        share = decoded(ours).exp_avg_sqs[0].double().sqrt().sum() / start.double().sqrt().sum()
        assert share.item() == pytest.approx(0.999**150, rel=3e-3)
        assert (decoded(ours).exp_avg_sqs[0] < start).float().mean() > 0.8


def test_keys_differ() -> None:
    keys = {key_of(seed, number) for seed in (0, 1, -1, 2**63 - 1) for number in range(100)}
    assert len(keys) == 400 and all(-(2**63) <= key < 2**63 for key in keys)
    assert Coding(None, 0, 0, 1) and in_rows(torch.zeros(3)).shape == (1, 3)
