"""A run keeps what it did, goes on where it stopped, and mixes nothing."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import machine, stages
from benchmarks import run as module
from benchmarks.apart import FailedError
from benchmarks.records import Records, Row
from benchmarks.run import main
from tests.benchmarks.made_up import rows


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the jobs as they are measured; all are quickly done."""
    names: list[str] = []

    def job(name: str) -> Callable[[], list[Row]]:
        def measure() -> list[Row]:
            names.append(name)
            if name == "broken":
                raise FailedError("its process died")
            return rows(name, {"amp": [1.0, 2.0]})

        return measure

    jobs = {"first": {"a": job("a"), "b": job("b")}, "second": {"c": job("c"), "broken": job("broken")}}
    monkeypatch.setattr(module, "stages", lambda setup: jobs)
    monkeypatch.setattr(module, "sow", lambda setup: None)
    return names


def test_a_full_run(log: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "r.json"
    assert main(["--out", str(path)]) == 0
    assert log == ["a", "b", "c", "broken"]
    found = Records.load(path)
    assert found.cases("first")["b"]["amp"].figures["seconds"] == [1.0, 2.0]
    assert found.cases("second")["broken"]["amp"].why == "its process died"
    assert found.about["device"] == "cpu" and found.about["threads"] >= 1 and found.about["packages"]["torch"]
    assert found.about["peers"]["amp"]["compiler"] == "amp"
    assert set(found.stages["first"]["a"]) == {"rows", "minutes", "commit", "load"}
    assert "a, amp: 1500 ms (1250 to 1750)" in capsys.readouterr().out


def test_resume_does_what_is_left(log: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = str(tmp_path / "r.json")
    assert main(["first", "--out", path]) == 0
    assert main(["--out", path, "--resume", "--minutes", "1e-9"]) == 1
    assert log == ["a", "b"] and "lacks 2 jobs: run again with --resume" in capsys.readouterr().out
    assert main(["--out", path, "--resume"]) == 0
    assert log == ["a", "b", "c", "broken"]


@pytest.mark.parametrize("how", ["its own limit", "the machine's"])
def test_a_run_that_is_cut_off_keeps_what_is_done(
    how: str, log: list[str], tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, patience = tmp_path / "r.json", ["--minutes", "30"] if how == "its own limit" else []
    jobs = module.stages(None)
    quick = jobs["first"]["b"]

    def slow() -> list[Row]:
        if how == "its own limit":
            assert 1000 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1800
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # the end comes here, however slow the machine was before
        else:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        return []

    jobs["first"]["b"] = slow
    before = signal.getsignal(signal.SIGTERM)
    assert main(["--out", str(path), *patience]) == 1
    assert signal.getsignal(signal.SIGTERM) is before
    assert "out of time in first: b" in (told := capsys.readouterr().out) and "lacks 3 jobs" in told
    assert Records.load(path).stages.keys() == {"first"} and log == ["a"]
    jobs["first"]["b"] = quick
    assert main(["--out", str(path), "--resume"]) == 0 and log == ["a", "b", "c", "broken"]


def test_what_a_gpu_would_measure_is_listed_without_one(capsys: pytest.CaptureFixture) -> None:
    assert main(["--device", "cuda", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in listed[:6]] == [
        "broken",
        "kernels",
        "scaler",
        "published",
        "training",
        "inference",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_missing_gpu_is_named(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cuda"])
    assert "sees no CUDA device; --list names what would be measured, --rehearse" in capsys.readouterr().err


def test_a_stage_alone_is_measured_again_and_leaves_the_others(log: list[str], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    main(["--out", str(path)])
    assert main(["first", "--out", str(path)]) == 0
    assert log == ["a", "b", "c", "broken", "a", "b"]
    assert set(Records.load(path).stages) == {"first", "second"}


def test_results_of_two_versions_are_not_mixed(
    log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = str(tmp_path / "r.json")
    main(["--out", path])
    monkeypatch.setattr(machine, "_version", lambda package: "0.0")
    for again in (["first"], ["--resume"]):
        with pytest.raises(SystemExit):
            main([*again, "--out", path])
        assert "was measured with another packages: name another file by --out" in capsys.readouterr().err
    assert main(["--out", path]) == 0 and len(log) == 8


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["frist"], "no stage is called frist; there are first, second"),
        (["--tiny"], "need --out"),
        (["--rehearse"], "need --out"),
    ],
)
def test_wrong_arguments(log: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err and not log


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("tiny", [True, False])
def test_every_stage_has_jobs_by_distinct_names(device: str, tiny: bool, tmp_path: Path) -> None:
    setup = stages.Setup("cpu", device, 1.0, tiny, tmp_path)
    found = stages.stages(setup)
    assert {"inference", "training", "architectures", "growth", "compile", "kernels"} <= found.keys()
    assert all(found.values())
    for stage, works in setup.works().items():
        assert {work.name for work in works} <= found[stage].keys()
        assert all(len(dict(work.cases())) == max(1, len(work.training)) for work in works)


def test_caches_start_as_the_seed_and_leave_it_alone(tmp_path: Path) -> None:
    (tmp_path / "probe").write_text("kept")
    with stages.Setup("cpu", "cpu", 1.0, True, tmp_path).caches() as caches:
        assert (caches / "probe").read_text() == "kept"
        (caches / "compiled").touch()
    assert [file.name for file in tmp_path.iterdir()] == ["probe"]
