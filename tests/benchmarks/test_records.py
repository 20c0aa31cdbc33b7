"""Results survive the file, those of other code are measured anew, and tables show ratios within rounds."""

import json
from pathlib import Path

from benchmarks.peers import AMP, BASELINE
from benchmarks.records import Records
from benchmarks.tables import duration, tabulate, times_faster


def test_a_file_comes_back_as_it_was_and_a_job_repeated_replaces_itself(tmp_path: Path) -> None:
    path = tmp_path / "here" / "r.json"
    saved = Records(path, {"commit": "a"})
    for seconds in (1.0, 1 / 3):
        saved.add("stage", "job", seconds=[seconds])
    saved.add("stage", "alike", seconds=[1 / 3])
    assert json.loads(path.read_text())["stages"] == {"stage": {"job | alike": {"seconds": [0.333333]}}}
    third = {"seconds": [0.333333]}
    assert Records.load(path).stages == saved.stages == {"stage": {"job": third, "alike": third}}
    assert Records.resume(path, {"commit": "a"}).stages and not Records.resume(path, {"commit": "b"}).stages


def test_drift_cancels_in_ratios() -> None:
    assert times_faster({"seconds": [1.0, 2.0, 20.0]}, {"seconds": [2.0, 4.0, 40.0]}) == 2.0


def test_a_table_has_a_line_for_each_peer_that_ran_and_reasons_for_the_others() -> None:
    peers = {"eager": {"seconds": [4.0]}, BASELINE: {"seconds": [2.0], "launches": 7.0}, AMP: {"seconds": [1.0]}}
    text = tabulate(peers | {"other": {"why": "not installed"}})
    assert [line.split(" | ")[:3] for line in text.splitlines()[2:5]] == [
        ["| eager", "0.50", "4 s"],
        [f"| {BASELINE}", "1.00", "2 s"],
        [f"| {AMP}", "2.00", "1 s"],
    ]
    assert "launches" in text and "peak" not in text and text.endswith("- other: not installed\n")
    assert "times as fast as eager" in tabulate({"eager": {"seconds": [4.0]}})
    assert [duration(s) for s in (2.0, 3e-3, 4.56e-6)] == ["2 s", "3 ms", "4.56 µs"]
