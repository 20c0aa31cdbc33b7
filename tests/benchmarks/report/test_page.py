"""The page says what the results say: kept and missed, won and lost alike."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import AMP
from benchmarks.records import Row, spread
from benchmarks.report import page as module
from benchmarks.report.page import page
from benchmarks.report.tables import duration
from benchmarks.scaler_step import CASE, RECAST, REMAINDER, STOCK
from tests.benchmarks.made_up import records, rows

pytest.importorskip("matplotlib")


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "PAGE", tmp_path / "docs" / "benchmarks.md")
    return lambda **changes: page([records(tmp_path / "results" / "r.json", **changes)])


def test_figures_stand_beside_the_machine(written: Any) -> None:
    text = written()
    assert "## Abacus 9000\n" in text and "2 cores, 2 threads, 16 GiB, avx512_bf16" in text
    assert "torch 2.13.0" in text and "Commit abc1234" in text and "liger-kernel" not in text
    line = next(line for line in text.splitlines() if line.startswith("| **amp** | **2.00** (2.00 to 2.00) | 4.02 ms"))
    assert "| 512 MiB | 7 | 1.0 MiB | 0 | 3.0e-03 |" in line
    assert "| **amp** | **1.25** (1.25 to 1.25) | 20.1 ms (19.9 to 20.2) | 28 % |" in text
    assert "A copy moves 49.8 GB/s; matrix products reach 100 Gflop/s in float32." in text
    assert "8.2500 |" in text and "loss after 3 steps" in text
    assert "- Thunder + autocast: lightning-thunder is not installed\n" in text


def test_what_is_kept_and_missed(written: Any) -> None:
    text = written()
    assert "| at least 1.9 times as fast as Inductor + autocast | GPT 23M, 1x16 | 2 | yes |" in text
    assert (
        "| at most 1.1 times the compile time of Inductor + autocast | GPT 23M, 4x128, cold start | 1.05 | yes |"
        in text
    )
    assert "**no**" not in text
    text = written(amp=1.5, host_syncs=1)
    assert "| at least 1.9 times as fast as Inductor + autocast | GPT 23M, 1x16 | 1.33 | **no** |" in text
    assert "| no host sync | GPT 23M, 1x16 | 1 | **no** |" in text


@pytest.mark.parametrize(("time", "kept"), [(1.0, "yes"), (1.2, "**no**")])
def test_the_step_is_held_to_what_memory_allows(
    time: float, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE", tmp_path / "benchmarks.md")
    found = records(tmp_path / "r.json")
    ours = rows(CASE, {AMP: [time] * 3, REMAINDER: [time] * 3}, bound_seconds=[0.96, 0.95, 0.94])
    found.add("scaler", "step", [*rows(CASE, {STOCK: [1.5] * 3, RECAST: [1.25] * 3}), *ours], minutes=1, commit="c")
    text = page([found])
    assert f"| at least 0.9 of the bound | {CASE} | {0.95 / time:.3g} | {kept} |" in text
    assert f"| with remainders, at most 0.9 of the time of {RECAST} | {CASE} | {time / 1.25:.3g} | {kept} |" in text
    assert f"| {100 * 0.95 / time:.0f} % |" in text


def test_losses_are_listed_with_their_cause(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.report.targets.CAUSES", {r"^cpu training .*step$": "one cast too many"})
    text = written(amp=2.5)
    assert "| training, GPT 23M, 4x128: step: amp against Inductor + autocast | 0.53 | one cast too many |" in text
    assert "| kernels, AdamW: amp against torch: fused | 0.50 | cause not known yet |" in text


def test_ours_failing_is_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE", tmp_path / "benchmarks.md")
    found = records(tmp_path / "r.json")
    unable = "on a CPU reduce-overhead is the default mode: all it adds is CUDA graphs"
    failed = [Row("T5, 1x16", "amp", why="its process died"), Row("T5, 1x16", "amp, reduce-overhead", why=unable)]
    found.add("architectures", "T5", failed, minutes=1, commit="c")
    text = page([found])
    assert "| architectures, T5, 1x16: amp | doesn't run | its process died |" in text
    assert "reduce-overhead | doesn't run" not in text and f"- amp, reduce-overhead: {unable}" in text


def test_growth_in_words(written: Any) -> None:
    text = written()
    assert "- A call of amp takes 10 µs and 1.00 µs a weight longer than one of Inductor, converted." in text
    assert "- Our passes take 0.40 s on 4000 nodes, and grow as nodes to the power of 1.00." in text


def test_pictures_are_there_and_the_same_each_time(written: Any, tmp_path: Path) -> None:
    links = re.findall(r"!\[\w+\]\((.*)\)", written())
    files = [(tmp_path / "docs" / link).resolve() for link in links]
    assert len(files) == 4 and all(file.read_text().count("<path") > 10 for file in files)
    before = [file.read_bytes() for file in files]
    written()
    assert [file.read_bytes() for file in files] == before


@pytest.mark.parametrize(
    "seconds, text", [(2.5, "2.5 s (2.5 to 2.5)"), (0.0032, "3.2 ms (3.2 to 3.2)"), (4e-8, "0.04 µs (0.04 to 0.04)")]
)
def test_durations_in_fitting_units(seconds: float, text: str) -> None:
    assert duration(spread([seconds])) == text
