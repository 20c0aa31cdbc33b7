"""Results survive the file, and ratios are taken within rounds."""

import json
from pathlib import Path

import pytest

from benchmarks.peers import AMP, BASELINE
from benchmarks.records import Records, Row, rival, spread, times_faster
from tests.benchmarks.made_up import records, rows


def test_spread() -> None:
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 3.0, 4.0)
    assert spread([7.0]) == (7.0, 7.0, 7.0)


def test_drift_cancels_in_ratios() -> None:
    slow, fast = rows("", {"slow": [2.0, 4.0, 40.0], "fast": [1.0, 2.0, 20.0]})
    assert times_faster(fast, slow) == (2.0, 2.0, 2.0)


def test_rival() -> None:
    def of(**seconds: float) -> str | None:
        return rival({row.peer: row for row in rows("", {name: [value] for name, value in seconds.items()})})

    assert of(**{"eager fp32": 1.0, BASELINE: 2.0, AMP: 0.5}) == BASELINE
    assert of(**{"torch: a": 3.0, "torch: b": 2.0, AMP: 1.0, f"{AMP}, max-autotune": 0.9}) == "torch: b"
    assert of(**{AMP: 1.0}) is None
    assert rival({BASELINE: Row("", BASELINE, why="died"), AMP: Row("", AMP, {"seconds": [1.0]})}) is None


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    saved = records(tmp_path / "here" / "r.json")
    loaded = Records.load(saved.path)
    assert (loaded.about, loaded.stages) == (saved.about, saved.stages)
    case = loaded.cases("inference")["GPT 23M, 1x16"]
    assert case[AMP].figures["casts"] == 7 and case["Thunder + autocast"].why and not case["Thunder + autocast"].figures
    assert [stage for stage, _ in loaded.rows()].count("kernels") == 5
    assert [file.name for file in saved.path.parent.iterdir()] == ["r.json"]


def test_a_job_repeated_replaces_its_rows(tmp_path: Path) -> None:
    found = Records(tmp_path / "r.json", {})
    for seconds in (1.0, 1 / 3):
        found.add("stage", "job", rows("case", {AMP: [seconds]}), commit="c")
    assert json.loads(found.path.read_text())["stages"]["stage"]["job"]["rows"] == [
        {"case": "case", "peer": AMP, "figures": {"seconds": [pytest.approx(1 / 3, rel=1e-5)]}}
    ]
