"""What the scaler knows about an optimizer is that optimizer's own, and goes with it; many skips are warned of."""

import gc
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from ampcompile.errors import AmpWarning, ScalerError
from ampcompile.scaler.clipping import pending, set_pending
from ampcompile.scaler.records import LOOK_EVERY, TOO_MANY, Record, Records, SkipWatch
from tests.scaler.cases import params_with


class Duck:
    """An optimizer that can be neither hashed nor referred to weakly."""

    __slots__ = ("param_groups",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.param_groups = [{"params": [nn.Parameter(torch.ones(1))]}]


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(params_with(1.0), lr=0.1)


def test_each_optimizer_has_one_record_that_goes_with_it() -> None:
    records, first, second = Records(), sgd(), sgd()
    assert records[first] is records[first] and records[first] is not records[second]
    assert records[first].optimizer() is first
    del first
    gc.collect()
    assert list(records._by_id) == [id(second)]


def test_an_id_that_another_optimizer_has_now_gives_a_new_record() -> None:
    records, first, second = Records(), sgd(), sgd()
    records._by_id[id(second)] = records[first]
    assert records[second].optimizer() is second and records[second] is not records[first]


def test_a_duck_typed_optimizer_is_held() -> None:
    records, duck = Records(), Duck()
    assert records[duck] is records[duck] and records[duck].optimizer() is duck


@pytest.mark.parametrize(
    ("flags", "skipped"),
    [((), False), ((0.0,), False), ((1.0,), True), ((0.0, 0.0), False), ((0.0, 2.0), True), ((1.0, 1.0), True)],
)
def test_a_step_was_skipped_if_any_flag_is_set(flags: tuple[float, ...], skipped: bool) -> None:
    optimizer = sgd()
    record = Record(lambda: optimizer, found_infs=tuple(torch.full((1,), flag) for flag in flags))
    found = record.skipped()
    assert found.dtype == torch.bool and found.shape == () and found.item() == skipped
    assert Record(lambda: None, found_infs=()).skipped().item() is False, "the optimizer may be gone"


def test_before_the_first_step_there_is_nothing_to_tell() -> None:
    with pytest.raises(ScalerError, match="found no step so far"):
        Record(lambda: None).skipped()


@pytest.mark.parametrize("scaled", [True, False])
def test_the_end_of_an_iteration_drops_what_is_pending_or_marks_it_as_over(scaled: bool) -> None:
    records, optimizer = Records(), sgd()
    assert records[optimizer].optimizer() is optimizer
    set_pending(optimizer, {torch.device("cpu"): torch.ones(())}, [])
    begun: list[bool] = []
    records.end_iteration(partial(begun.append, True) if scaled else None)
    left = pending(optimizer)
    assert (left is None and begun) if scaled else (left is not None and left.over)


# Skips in a row: a warning once, a little late, without a question to the device


def looks(watch: SkipWatch, skips: int, updates: int) -> list[str]:
    """The warnings of some updates with that many skips in a row."""
    watch.skips.fill_(skips)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(updates):
            watch.look()
    assert all(warning.category is AmpWarning for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("skips", "warned"), [(TOO_MANY - 1, 0), (TOO_MANY, 1), (TOO_MANY + 7, 1)])
def test_a_run_that_is_too_long_is_warned_of_with_its_length(skips: int, warned: int) -> None:
    found = looks(SkipWatch(torch.device("cpu")), skips, LOOK_EVERY)
    assert len(found) == warned and all(f"in {skips} updates in a row" in text for text in found)


def test_it_looks_now_and_then_and_warns_once() -> None:
    watch = SkipWatch(torch.device("cpu"))
    assert watch.skips.dtype == torch.int32 and watch.skips.shape == () and not watch.skips.item()
    assert not looks(watch, TOO_MANY, LOOK_EVERY - 1)
    assert not looks(watch, 0, 1), "the run has ended by the time it looks"
    assert not looks(watch, TOO_MANY, LOOK_EVERY - 1)
    assert len(looks(watch, TOO_MANY, 1)) == 1
    assert not looks(watch, 10 * TOO_MANY, 3 * LOOK_EVERY)
