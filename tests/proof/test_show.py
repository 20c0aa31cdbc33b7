"""Results are shown as text, and each failure in the committed ones is expected."""

from pathlib import Path

import pytest

from proof import expected
from proof.part import HOMES
from proof.results import Failure, Verdict, find_records, name_file, open_records, read_verdicts
from proof.show import show

AT_MOST = 22
"""Entries in the list of expected failures: lower it with each that goes."""


def test_what_holds_is_counted_and_what_doesnt_is_told_with_its_reason(tmp_path: Path) -> None:
    about = {"processor": "a CPU", "low-precision instructions": [], "system": "Linux", "python": "3", "torch": "2"}
    records = open_records(tmp_path / name_file("in_place", (1, 1)), about | {"commit": "c"})
    entry = next(each for each in expected.EXPECTED if each.part == "in_place")
    for verdict in (
        Verdict("abs, f32 x f32", {"same bits": 3, "fails": 1}, [Failure("strides", "a | b")]),
        Verdict(f"{entry.name}, f32 x f32", {"stock fails too": 1}, [Failure(entry.kind, "so", stock=True, times=2)]),
    ):
        records.add(*verdict.place, **verdict.noted())
    text = show(["in_place"], tmp_path)
    assert "a CPU, no 16-bit units; Linux, Python 3, torch 2; commit c." in text
    assert "75.00% hold: 3 of 4" in text and "So far 2 of the sample's" in text
    assert "| `abs, f32 x f32` | strides | 1 | no | cause not known yet; a \\| b |" in text
    assert f"| `{entry.name}` | {entry.kind} | 2 | yes | {entry.reason}; f32 x f32: so |" in text
    assert show(["ops"], tmp_path) == ""


@pytest.mark.parametrize("name", HOMES)
def test_each_failure_is_expected_and_no_more_than_those(name: str) -> None:
    found = list(expected.explain_failures(name, read_verdicts(find_records(name))))
    unknown = [(group, failure) for group, failure, entry in found if entry is None]
    assert not unknown, "mend these, or list them in proof/expected.py with the reason"
    unmet = {entry for entry in expected.EXPECTED if entry.part == name} - {entry for _, _, entry in found}
    assert not unmet, "these hold now: take them off the list"


def test_the_list_only_shrinks() -> None:
    assert len(expected.EXPECTED) <= AT_MOST
    assert all(entry.reason and entry.part in HOMES for entry in expected.EXPECTED)
