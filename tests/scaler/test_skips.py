"""A long run of skipped steps is warned of once, a little late, and without a question to the device."""

import warnings

import pytest
import torch

from ampcompile.errors import AmpWarning
from ampcompile.scaler.records import LOOK_EVERY, TOO_MANY, SkipWatch


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
