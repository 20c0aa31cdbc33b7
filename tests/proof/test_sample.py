"""A fixed sample of each part, run anew; what is expected to fail still does.

That of "masters" takes a minute; `test_masters.py` has a short run of it.
"""

import random
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest

from ampcompile.torch_private import processor
from proof import expected
from proof.models.sweep import MISSING
from proof.part import load_part
from proof.results import find_records, read_verdicts

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore")]  # torch's deprecations, met on purpose
SAMPLES = {"ops": 24, "mixed": 12, "in_place": 12, "inductor": 1, "models": 4, "convergence": 1, "masters": 1}


@pytest.mark.parametrize(
    ("name", "first"),
    [
        pytest.param(name, first, marks=[pytest.mark.slow] * (first or name == "masters"))
        for name, count in SAMPLES.items()
        for first in range(min(2, count))
    ],
)
def test_a_sample_holds(name: str, first: int) -> None:
    """CI runs every other group, from the first on."""
    for group in random.Random(0).sample(load_part(name).groups(False), SAMPLES[name])[first::2]:
        for failure in load_part(name).run(group).failures:
            assert any(entry.covers(name, group, failure) for entry in expected.EXPECTED), (group, failure)


def known() -> list[Any]:
    """One group for each entry of the list; whole models take up to 36 s each."""
    found = {
        entry: (name, group, entry)
        for name in SAMPLES
        for group, failure, entry in expected.explain_failures(name, read_verdicts(find_records(name)))
    }
    return [pytest.param(*each, marks=[pytest.mark.slow] * (each[0] == "models")) for each in found.values()]


@pytest.mark.parametrize("name, group, entry", known(), ids=lambda value: str(value)[:60])
def test_what_is_expected_to_fail_does(name: str, group: str, entry: expected.Expected) -> None:
    emulated = nullcontext()
    if entry.without_units is not None:
        emulated = patch.object(processor, "multiplies", lambda dtype: dtype != entry.without_units)
    with emulated:
        verdict = load_part(name).run(group)
    if MISSING in verdict.counts:
        pytest.skip("its package isn't installed")
    assert verdict.failures, "it holds now: take it off the list"
