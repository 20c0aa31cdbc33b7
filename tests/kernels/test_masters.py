"""Float32 weights are kept bit for bit in a parameter and its remainder; random rounding is Philox's on all devices."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ampcompile.kernels.adam import AdamGroup, adam_
from ampcompile.kernels.masters import checksums_of, philox, random_bits, read_master, write_master
from ampcompile.kernels.sgd import SgdGroup, SgdTensors, sgd_
from ampcompile.kernels.tables import SPAN
from tests.kernels.engines import Engine
from tests.kernels.references import read_weight
from tests.pairs import pairs
from tests.scaler.cases import GRAD_DTYPES, HOWS, OPTIMIZERS, adam_tensors, assert_close, assert_equal, with_masters


def floats(*bits: int) -> Tensor:
    return torch.tensor(bits).to(torch.int32).view(torch.float32)


def split(master: Tensor, dtype: torch.dtype = torch.int16) -> tuple[Tensor, Tensor, Tensor]:
    """Its parameter, remainder and checksums."""
    spans = -(-master.numel() // SPAN)
    param, remainder = (torch.zeros_like(master, dtype=each) for each in (torch.bfloat16, dtype))
    write_master(param, remainder, sums := torch.zeros(spans, dtype=torch.int32), master)
    return param, remainder, sums


def test_every_float32_but_the_payload_of_a_nan_is_kept() -> None:
    high, low = torch.arange(2**16) << 16, torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    masters = (high[:, None] | low).to(torch.int32).view(torch.float32)
    param, *kept = split(masters)
    assert_equal(
        [read_master(param, *kept).nan_to_num(0.0, torch.inf, -torch.inf)],
        [masters.nan_to_num(0.0, torch.inf, -torch.inf)],
    )
    assert torch.equal(param.isnan(), masters.isnan()), "no NaN becomes a number"
    assert torch.equal(param.view(torch.int16)[masters.isnan()].unique(), torch.tensor([0x7FC0], dtype=torch.int16))


def test_of_24_bits_the_nearest_with_the_same_parameter_are_kept() -> None:
    high, low = torch.arange(2**16) << 16, torch.tensor([0, 0x7F, 0x80, 0x7F7F, 0x7FFF, 0x8000, 0xFF7F, 0xFFFF])
    masters = (high[:, None] | low).to(torch.int32).view(torch.float32)
    param, *kept = split(masters, torch.int8)
    assert_equal([param], [split(masters)[0]])
    back = read_master(param, *kept)
    assert torch.equal(back.isfinite(), masters.isfinite()) and torch.equal(back.isnan(), masters.isnan())
    errors = (back.view(torch.int32) - masters.view(torch.int32)).abs()[masters.isfinite()].view(-1, len(low)).amax(0)
    assert errors.tolist() == [0, 0x7F, 0x80, 0x7F, 0xFF, 0, 0x7F, 0xFF], "the last would be infinite"


def test_the_parameter_is_the_nearest_and_of_two_the_one_away_from_zero() -> None:
    ordinary = torch.randn(1000)
    assert torch.equal(split(ordinary)[0], ordinary.bfloat16())
    ties = floats(0x3F808000, 0xBF808000, 0x3F818000, 0x00008000, 0x80008000)
    assert_equal([split(ties)[0].float()], [floats(0x3F810000, 0xBF810000, 0x3F820000, 0x00010000, 0x80010000)])
    largest = floats(0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7F8000, 0x7F800000)
    assert split(largest)[0].isinf().tolist() == [False, True, True, True, True]
    param, *kept = split(largest)
    assert_equal([read_master(param, *kept)], [largest]), "finite again"
    assert torch.equal(split(floats(0x80000000, 0))[0].view(torch.int16), torch.tensor([-(2**15), 0]).short())


def test_what_was_written_since_counts_as_it_is_and_the_rest_is_kept() -> None:
    masters = torch.randn(5 * SPAN - 5).view(-1, 5)
    param, *kept = split(masters)
    param.copy_(param.clone())
    assert_equal([read_master(param, *kept)], [masters]), "the same bits"
    param.view(-1)[SPAN + 7] *= 1 + 2**-7
    expected = masters.flatten().clone()
    expected[SPAN : 2 * SPAN] = param.flatten()[SPAN : 2 * SPAN].float()
    assert_equal([read_master(param, *kept)], [expected.view(-1, 5)])
    param, master = torch.tensor([1.0, 2.0, 3.0]).half(), torch.tensor([1.0001, 2.0001, 3.0001])
    param[1] = 5.0
    assert_equal([read_master(param, master, None)], [torch.tensor([1.0001, 5.0, 3.0001])])


def test_a_checksum_changes_with_any_parameter() -> None:
    bits = torch.randint(2**16, (SPAN,))
    changed = bits.repeat(SPAN, 1)
    changed.diagonal().copy_((bits + torch.randint(1, 2**16, (SPAN,))) % 2**16)
    assert (checksums_of(changed.flatten()) != checksums_of(bits)).all()
    assert len(checksums_of(torch.ones(SPAN + 1))) == 2 and not checksums_of(torch.zeros(3)).any()


def test_philox_gives_the_words_that_its_authors_publish() -> None:
    """Of the known answers of Random123."""
    ones = 2**32 - 1
    for counter, key, words in (
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ):
        assert [word.item() for word in philox([torch.tensor([word]) for word in counter], key)] == list(words)
    assert random_bits([0, 0, 0], 3).tolist() == [0xE8D5, 0xC58D, 0xAC4C]


def weights_of(tensors: Any) -> list[Tensor]:
    return [read_weight(tensors, i).clone() for i in range(len(tensors.params))]


def check_step(step: Callable[..., None], tensors: Any, how: str, dtype: torch.dtype) -> Any:
    """Assert that a step on 16-bit parameters is that on float32 ones, rounded; return the tensors after it."""
    ours = with_masters(tensors, how, dtype)
    wide = replace(deepcopy(tensors), params=weights_of(ours), copies=ours.copies)
    for each in (ours, wide):
        step(each, torch.tensor(0.3), torch.zeros(()))
    for state in ours.STATES:
        assert_equal(getattr(ours, state), getattr(wide, state))
    for param, kept, sums, weight in zip(ours.params, ours.kept, ours.checksums, wide.params, strict=True):
        rounded = torch.empty_like(param)
        write_master(rounded, kept.clone(), None if sums is None else sums.clone(), weight)
        assert_equal([param], [rounded])
    if how != "stochastic":
        assert_equal(weights_of(ours), wide.params)
    return ours


@pytest.mark.parametrize(("name", "how", "grad_dtype"), pairs([*OPTIMIZERS], HOWS, GRAD_DTYPES), ids=str)
def test_steps_are_those_of_float32_parameters(name: str, how: Any, grad_dtype: torch.dtype, engine: Engine) -> None:
    make, groups, step, reference_step = OPTIMIZERS[name]
    tensors = make(groups, grad_dtype, sizes=engine.sizes)
    ours, plain = check_step(step, tensors, *how), check_step(reference_step, tensors, *how)
    if how[0] == "stochastic":
        assert_equal(ours.kept, plain.kept)
    else:
        assert_close(weights_of(ours), weights_of(plain))


@pytest.mark.parametrize("how", ["remainder", "float32", "stochastic"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_nothing_but_the_count_of_random_steps(name: str, how: str, engine: Engine) -> None:
    make, groups, *steps = OPTIMIZERS[name]
    ours = with_masters(make(groups, sizes=engine.sizes), how)
    before = deepcopy(ours)
    for count, step in enumerate(steps, 1):
        step(ours, torch.tensor(torch.nan), torch.tensor(1.0))
        if how == "stochastic":
            before.kept = [key + torch.tensor([0, 0, 1]) for key in before.kept]
            assert ours.kept[0].tolist() == [2**40 + 7, 0, 5 + count]
        for state in ("params", "kept", "checksums", *ours.STATES):
            assert_equal(getattr(ours, state), getattr(before, state))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_begins_from_what_was_written(name: str, engine: Engine) -> None:
    make, groups, step, _ = OPTIMIZERS[name]
    for how in ("remainder", "float32"):
        ours = with_masters(make(groups, sizes=engine.sizes), how)
        for param in ours.params:
            param[::2] *= 2
        expected = deepcopy(ours)
        expected.params = weights_of(ours)
        expected.kept = expected.checksums = [None] * len(ours.params)
        step(ours)
        step(expected)
        assert_equal(weights_of(ours), expected.params)


@pytest.mark.parametrize("how", ["remainder", "stochastic"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_nan_becomes_a_number_in_a_step(name: str, how: str, engine: Engine) -> None:
    """Not by a carry into its sign, either."""
    make, groups, step, _ = OPTIMIZERS[name]
    ours = with_masters(make(groups[:1], sizes=(300,)), how)
    ours.grads[0].view(torch.int32).fill_(0x7FFFFFFF)
    step(ours)
    assert ours.params[0].isnan().all()


def test_random_rounding_is_right_on_average() -> None:
    """10^7 roundings of each of four numbers between 1 and the next bfloat16, in C++."""
    n = 10**7
    for share in (0.001, 0.25, 0.5, 0.9):
        param, step = torch.ones(n, dtype=torch.bfloat16), torch.full((1,), share * 2**-7)
        share = round(share * 2**16) / 2**16  # what float32 has of it
        group = SgdGroup(-1.0, 0.0, 0.0, False, 0.0, False)
        grads = step.expand(n).contiguous()
        sgd_(
            SgdTensors(
                [group], [param], [grads], [None], [torch.tensor([1, 2, 3])], group_of=[0], momentum_buffers=[None]
            )
        )
        ups = (param == 1 + 2**-7).sum().item()
        assert ups + (param == 1).sum().item() == n
        assert abs(ups - n * share) < 3 * (n * share * (1 - share)) ** 0.5


def test_an_element_is_rounded_alike_wherever_it_is_and_by_however_many_threads() -> None:
    group = AdamGroup(0.3, 0.9, 0.99, 1e-3, 0.0, True, False)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        tensors = adam_tensors([group], sizes=(70000, 16385, 100))
        tensors.grads = [torch.ones_like(p, dtype=torch.float32) for p in tensors.params]
        tensors.exp_avgs, tensors.exp_avg_sqs = ([torch.ones_like(g) for g in tensors.grads] for _ in range(2))
        ours = with_masters(tensors, "stochastic")
        for param in ours.params:
            param.fill_(1.0)
        ours.kept = [torch.tensor([3, 4, 5]) for _ in ours.kept]
        ours.steps = [torch.zeros(()) for _ in ours.kept]
        ours.max_exp_avg_sqs = [None] * len(ours.kept)
        adam_(ours)
        results.append(ours.params)
    torch.set_num_threads(1)
    assert_equal(*results)
    long, middle, short, *_ = results[0]
    assert torch.equal(long[:16385], middle) and torch.equal(long[:100], short) and long.unique().numel() == 2
