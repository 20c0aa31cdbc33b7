"""The README: its Python runs, its loop gives the losses of the one it replaces, its figures are those measured."""

import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.records import RESULTS, Records, times_faster
from benchmarks.scaler_step import RECAST
from tests import pages
from tests.test_layout import ROOT

FREEZING = "Inductor + autocast, freezing"
TEXT = (ROOT / "README.md").read_text()


def test_the_first_screen_has_both_commands_and_losses_stand_before_the_comparison() -> None:
    first = TEXT.splitlines()[:10]
    assert all(any(line.startswith(f"make {target} ") for line in first) for target in ("demo", "test"))
    order = ["## Quickstart", "## What to expect on your hardware", "\nWhere it loses", "## What it does that others"]
    assert [*map(TEXT.index, order)] == sorted(map(TEXT.index, order))


def test_its_python_runs_in_a_folder_of_its_own(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = pages.run("README.md")
    assert names["loss"].item() < 1 and names["loss"].dtype == torch.float32
    assert "hoisted" in capsys.readouterr().out and (tmp_path / "amp.html").exists()
    assert names["compiled"](names["x"]).isfinite().all()


def test_the_loop_gives_the_losses_of_the_loop_it_replaces() -> None:
    (diff,) = (block.code for block in pages.blocks("README.md") if block.language == "diff")
    losses = {}
    for side in "-+":
        code = textwrap.dedent("\n".join(line[1:] for line in diff.splitlines() if line[0] in f" {side}"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        losses[side] = recorded = list[float]()

        def loss_fn(found: Tensor, y: Tensor, recorded: list[float] = recorded) -> Tensor:
            recorded.append((loss := nn.functional.cross_entropy(found.float(), y)).item())
            return loss

        names = {"torch": torch, "model": model, "loss_fn": loss_fn}
        names["batches"] = [(torch.randn(8, 16), torch.randint(4, (8,)))] * 20
        names["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-2)
        exec(code.replace('"cuda"', '"cpu"'), names)
    torch.testing.assert_close(losses["+"], losses["-"], rtol=0.02, atol=0)
    assert losses["+"][-1] < 0.5 * losses["+"][0]


def test_its_figures_are_those_of_the_committed_results() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.report.plot import summary

    def between(speeds: list[float]) -> str:
        return f"{min(speeds):.2g} to {max(speeds):.2g} times as fast as Inductor"

    files = [Records.load(path) for path in sorted(RESULTS.glob("*.json"))]
    steps, calls = (
        [s["amp"].middle for c, s in summary(files).items() if ("4x128" in c) is step] for step in (True, False)
    )
    older = [rows for records in files for rows in records.cases("older-cpus").values()]
    single, lowered = (
        between([times_faster(rows["amp"], rows[f"Inductor {peer}"]).middle for rows in older])
        for peer in ("fp32", "+ autocast")
    )
    training = between(steps).removesuffix(" as fast as Inductor")
    assert f"{between(calls)} under autocast in inference, {training} in a training step" in TEXT
    assert f"{single} in float32, {lowered} under autocast, which emulates" in TEXT
    growth = [rows for records in files for case, rows in records.cases("growth").items() if " weights, 1x16" in case]
    tiny = [times_faster(rows["amp"], rows["Inductor + autocast"]).middle for rows in growth]
    lost = [speed for speed in tiny if speed < 0.97]
    assert f"{min(lost):.2f} to {max(lost):.2f} times the speed of Inductor under autocast" in TEXT
    epyc, xeon = (
        [
            each
            for each in files
            if name in each.about["processor"] and each.cases("inference") and "gpu" not in each.about
        ]
        for name in ("AMD", "Xeon")
    )
    frozen = [rows for records in epyc for rows in records.cases("inference").values() if FREEZING in rows]
    (faster,) = (1 / times_faster(rows["amp"], rows[FREEZING]).middle for rows in frozen if not rows[FREEZING].why)
    assert f"is {faster:.2f} times as fast on a GPT of 23 M parameters" in TEXT

    def of_xeon(stage: str, peer: str) -> list[float]:
        cases = [rows for records in xeon for rows in records.cases(stage).values() if peer in rows]
        return [times_faster(rows["amp"], rows[peer]).middle for rows in cases]

    serving, training = (between(of_xeon(stage, "Inductor + autocast")) for stage in ("inference", "training"))
    training = training.removesuffix(" as fast as Inductor")
    assert f"{serving} under autocast in inference, {training} in a training step of a GPT" in TEXT
    serving, training = (
        between(of_xeon(stage, "Inductor fp32")).removesuffix(" as fast as Inductor")
        for stage in ("inference", "training")
    )
    assert f"beside Inductor in float32 {serving} in inference, {training} in training" in TEXT


def test_its_figures_of_a_gpu_are_those_of_the_committed_results() -> None:
    (h200,) = (records for path in RESULTS.glob("*.json") if "gpu" in (records := Records.load(path)).about)
    calls, steps, (scaler,) = (
        h200.cases("inference"),
        h200.cases("training"),
        (rows for case, rows in h200.cases("scaler").items() if case.startswith("clip and AdamW")),
    )

    def faster(rows: Any, other: str = "Inductor + autocast", ours: str = "amp") -> float:
        return times_faster(rows[ours], rows[other]).middle

    def on_the_gpu(rows: Any) -> float:
        return rows["amp"].figures["device_seconds"] / rows["Inductor + autocast"].figures["device_seconds"]

    call, graphs = calls["GPT 124M, 1x16"], calls["GPT 124M, 1x16 (CUDA graphs)"]
    modes = (f"{peer}, reduce-overhead" for peer in ("Inductor + autocast", "amp"))
    assert f"takes {on_the_gpu(call):.2f} of the GPU's time and is {faster(call):.1f} times as fast" in TEXT
    assert f"{faster(graphs, *modes):.1f} times in CUDA graphs" in TEXT
    shares = [on_the_gpu(rows) for case, rows in steps.items() if "scaler" in case]
    speeds = [faster(rows) for rows in steps.values()]
    assert f"{shares[0]:.2f} of the GPU's time, and {min(speeds):.1f} to {max(speeds):.1f} times the speed" in TEXT
    assert f"with clipping is {faster(scaler, RECAST):.1f} times as fast as torch's" in TEXT
