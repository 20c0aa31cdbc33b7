"""Verdicts come back as they were written, also of a file that was cut off, and of shards."""

from pathlib import Path

from proof.results import Failure, Results, Verdict, name_of, of_part

VERDICT = Verdict("add, bfloat16", {"same bits": 2}, [Failure("values", "too far | by much", stock=True, times=3)])


def test_verdicts_are_kept_on_disk_one_by_one(tmp_path: Path) -> None:
    results = Results(tmp_path / "new" / "ops.jsonl")
    for about in ({"torch": "2"}, {"torch": "2"}, {"torch": "3"}):
        results.begin(about)
    results.add(Verdict("first"))
    results.add(VERDICT)
    assert Results.load(results.path) == results
    assert results.about == [{"torch": "2"}, {"torch": "3"}]


def test_of_two_verdicts_the_later_counts(tmp_path: Path) -> None:
    results = Results(tmp_path / "ops.jsonl")
    results.add(VERDICT)
    results.add(Verdict(VERDICT.group, {"fails": 1}))
    assert Results.load(results.path).verdicts == {VERDICT.group: Verdict(VERDICT.group, {"fails": 1})}


def test_a_line_that_was_cut_off_is_tried_again(tmp_path: Path) -> None:
    results = Results(tmp_path / "ops.jsonl")
    results.add(Verdict("first"))
    results.add(VERDICT)
    results.path.write_text(results.path.read_text()[:-9])
    found = Results.load(results.path)
    assert list(found.verdicts) == ["first"]
    found.add(VERDICT)
    assert Results.load(results.path).verdicts == results.verdicts


def test_shards_have_files_of_their_own_and_are_read_together(tmp_path: Path) -> None:
    assert name_of("ops", (1, 1)) == "ops.jsonl"
    for n in (1, 2):
        Results(tmp_path / name_of("ops", (n, 2))).add(Verdict(f"group {n}"))
    Results(tmp_path / "other.jsonl").add(Verdict("another part's"))
    assert [list(each.verdicts) for each in of_part("ops", tmp_path)] == [["group 1"], ["group 2"]]
