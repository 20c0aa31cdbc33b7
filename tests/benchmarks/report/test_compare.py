"""The guard fails when something of ours got worse, and only then."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import Row
from benchmarks.report import compare
from tests.benchmarks.made_up import records


def run(tmp_path: Path, **new: Any) -> int:
    files = [records(tmp_path / "old.json").path, records(tmp_path / "new.json", **new).path]
    return compare.main([str(file) for file in files])


@pytest.mark.parametrize("drift", [1.0, 3.0, 0.2])
def test_a_slower_machine_is_no_regression(drift: float, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tmp_path, drift=drift) == 0
    assert capsys.readouterr().out == "nothing changed\n"


def test_slower_code_is(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tmp_path, amp=1.2) == 1
    out = capsys.readouterr().out
    assert "WORSE: inference, GPT 23M, 1x16, amp: times as fast as Inductor + autocast 2, now 1.667" in out
    assert "WORSE: kernels, AdamW, amp: times as fast as torch: fused 1.25, now 1.042" in out


def test_faster_code_is_said_and_passes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tmp_path, amp=0.5) == 0
    assert "better: training, GPT 23M, 4x128: step, amp" in capsys.readouterr().out


def test_little_counts_only_if_it_is_more_than_the_tolerance(tmp_path: Path) -> None:
    assert run(tmp_path, amp=1.04) == 0
    old, new = str(tmp_path / "old.json"), str(tmp_path / "new.json")
    assert compare.main([old, new, "--tolerance", "0.02"]) == 1


@pytest.mark.parametrize(
    "figure, value", [("casts", 9), ("peak_bytes", 2**30), ("host_syncs", 1), ("cast_bytes", 2**21)]
)
def test_figures_besides_time(figure: str, value: int, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tmp_path, **{figure: value}) == 1
    assert f"amp: {figure} " in capsys.readouterr().out


def test_what_ran_before_must_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    records(tmp_path / "old.json")
    new = records(tmp_path / "new.json")
    new.add("training", "GPT 23M, 4x128", [Row("GPT 23M, 4x128: step", "amp", why="its process died")])
    assert compare.main([str(tmp_path / "old.json"), str(new.path)]) == 1
    assert "failures 0, now 1" in capsys.readouterr().out


def test_other_hardware_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    new = records(tmp_path / "new.json")
    new.about = new.about | {"processor": "Abacus 9001"}
    new.save()
    with pytest.raises(SystemExit):
        compare.main([str(records(tmp_path / "old.json").path), str(new.path)])
    assert "the files differ in processor" in capsys.readouterr().err
