"""Each command measures tiny inputs, prints a table, keeps the figures, and refuses what can't be measured here."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import machine, race
from benchmarks.__main__ import STOPPED, TESTS, main, run_gpu_tests, show
from benchmarks.machine import ROOT
from benchmarks.peers import AMP, BASELINE, GRAPHS, WHOLE
from benchmarks.records import RESULTS, Records


def test_the_scalers_step_is_measured_beside_torchs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "r.json"
    assert main(["scaler", "--tiny", "--file", str(file), "--only", "GPT"]) == 0
    (figures,) = json.loads(file.read_text())["stages"].values()
    assert AMP in figures and len({len(each["seconds"]) for each in figures.values()}) == 1
    assert f"| {AMP} | " in capsys.readouterr().out


def test_without_a_gpu_its_plan_is_refused_but_for_a_rehearsal(capsys: pytest.CaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA device")
    with pytest.raises(SystemExit):
        main(["gpu-check"])
    assert "--tiny tries the plan on the CPU" in capsys.readouterr().err


def test_a_test_run_tells_what_failed_and_stops_in_time(tmp_path: Path) -> None:
    test = tmp_path / "test_made_up.py"
    test.write_text(
        "import pytest, time\npytestmark = pytest.mark.gpu\n"
        "def test_right(): pass\ndef test_wrong(): assert 0\ndef test_slow(): time.sleep(600)\n"
    )
    given = [str(test), "--override-ini=addopts=", "-o", "markers=gpu"]
    found = run_gpu_tests([*given, "-k", "not slow"], processes=2)
    assert found["status"] == 1 and "1 failed, 1 passed" in found["said"]
    assert [name.rpartition("::")[2] for name in found["failed"]] == ["test_wrong"]
    assert run_gpu_tests(given, seconds=3, processes=2)["status"] == STOPPED


@pytest.mark.emulated
def test_a_check_of_a_gpu_is_rehearsed_goes_on_where_it_was_cut_off_and_shows_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The whole of it: `python -m benchmarks gpu-check --tiny`, as its help says."""
    monkeypatch.setattr(machine, "commit", str)  # somebody may edit meanwhile
    monkeypatch.setattr(command, "run_gpu_tests", lambda *_: {"status": 0, "said": "all passed", "failed": []})
    given = ["gpu-check", "--tiny", "--rounds", "1", "--file", str(tmp_path / "r.json")]
    given += ["--only", "BERT classifier", "--peers", "whole step"]
    assert main([*given, "--seconds", "0"]) == 1
    assert "3 works are left" in capsys.readouterr().out
    assert main(given) == 0
    said = capsys.readouterr().out
    row = f"| tiny BERT classifier, 2x32: clipped step | {AMP}{WHOLE} | "
    assert row in said.rpartition("| way |")[2] and f"{command.CHAINS.name}: all passed" in said
    monkeypatch.setattr(race, "enter", None)  # nothing is started again
    assert main(given) == 0 and row in capsys.readouterr().out


@pytest.mark.parametrize("path", [*sorted(RESULTS.glob("cpu-[!f]*.json")), RESULTS / "gpu-h200-steps.json"])
def test_committed_results_are_shown(path: Path) -> None:
    records = Records.load(path)
    text = show(records)
    assert all(stage in text for stage in records.stages if stage not in TESTS) and f"| {AMP} | " in text


def test_what_the_pages_say_of_the_h200_is_in_its_results() -> None:
    stages = Records.load(RESULTS / "gpu-h200-steps.json").stages
    measured = [
        [1e3 * figures[peer + how]["seconds"][0] for peer in (BASELINE, AMP)]
        for figures in stages.values()
        for how in ("", GRAPHS)
        if BASELINE + how in figures
    ]
    page = (ROOT / "docs" / "performance.md").read_text().partition("## On a GPU")[2]
    rows = [line.split("|")[2:5] for line in page.partition("\n\n- **")[0].splitlines() if line.startswith("|")][2:]
    assert [[float(cell.split(",")[0]) for cell in row[:2]] for row in rows] == [
        pytest.approx(each) for each in measured
    ]
    ratios = {ratio.strip(" *"): stock / ours for (*_, ratio), (stock, ours) in zip(rows, measured, strict=True)}
    del ratios[""]  # where the host limits the step
    assert all(f"{times:.2f}" == said for said, times in ratios.items())
    assert f"| bfloat16 | {min(ratios)} to {max(ratios)} |" in (ROOT / "README.md").read_text()
