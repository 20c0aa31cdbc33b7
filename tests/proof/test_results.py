"""Verdicts come back as they were written, those alike together, and those of shards."""

from pathlib import Path

from benchmarks.records import Records
from proof.results import Failure, Verdict, find_records, name_file, open_records, read_verdicts

FAILED = Verdict("add, bfloat16, train", {"same bits": 2}, [Failure("values", "too far | by much", True, times=3)])


def add(records: Records, *found: Verdict) -> None:
    for verdict in found:
        records.add(*verdict.place, **verdict.noted())


def test_verdicts_are_kept_on_disk_and_those_alike_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ops.json"
    for torch in ("2", "2", "3"):
        records = open_records(path, {"torch": torch})
        add(records, Verdict("first"), FAILED, *(Verdict(f"{name}, bfloat16", {"fails": 1}) for name in "abc"))
    assert records.about == {"runs": [{"torch": "2"}, {"torch": "3"}]}
    found = {verdict.group: verdict for verdict in read_verdicts([Records.load(path)])}
    assert found["first"] == Verdict("first") and found[FAILED.group] == FAILED
    assert [found[f"{name}, bfloat16"].counts for name in "abc"] == [{"fails": 1}] * 3
    assert path.read_text().count("fails") == 1


def test_shards_have_files_of_their_own_and_are_read_together(tmp_path: Path) -> None:
    assert name_file("ops", (1, 1)) == "ops.json"
    for n in (1, 2):
        add(open_records(tmp_path / name_file("ops", (n, 2))), Verdict(f"group {n}"))
    add(open_records(tmp_path / "other.json"), Verdict("another part's"))
    assert [verdict.group for verdict in read_verdicts(find_records("ops", tmp_path))] == ["group 1", "group 2"]
