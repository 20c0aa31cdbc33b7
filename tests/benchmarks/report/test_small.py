"""Figures of small models stand in a table and in a sentence, and in the pages where these are marked."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import AMP, BASELINE
from benchmarks.records import Records, Row
from benchmarks.report import small as module
from benchmarks.report.targets import targets
from benchmarks.small_models import MODELS
from benchmarks.small_steps import CALL, NAMES, STEP
from tests.benchmarks.made_up import ABOUT, rows

MARK, END = "<!-- small models, by python -m benchmarks docs -->", "<!-- end -->"


def results(path: Path) -> Records:
    """Steps of 1 ms by Inductor, calls of half as much, eager in float32 4 times as fast."""
    found = Records(path, ABOUT)
    for model, what in product(MODELS, (STEP, CALL)):
        scale = 1e-3 if what == STEP else 5e-4
        times: dict[str, Any] = {name: [scale] * 7 for name in NAMES}
        times |= {AMP: [2e-3] * 7, "eager fp32": [scale / 4] * 7, BASELINE: [0.8 * scale, 1.2 * scale, *[scale] * 5]}
        case = f"{model}: {what}"
        found.add("small", case, rows(case, times), minutes=1, commit="c")
    return found


def test_a_table_of_medians_and_ranges(tmp_path: Path) -> None:
    cases = results(tmp_path / "r.json").cases("small")
    cases["broken: step"] = {AMP: Row("broken: step", AMP, why="its process died")}
    lines = module.small_table(cases).splitlines()
    assert len(lines) == 2 + 2 * len(MODELS)
    assert lines[0].startswith(f"| amp, times as fast as | amp's time | {BASELINE} | eager fp32 |")
    assert lines[2].startswith("| MLP 3x64: step | 2 ms (2 to 2) | 0.50 (0.40 to 0.60) | 0.12 (0.12 to 0.12) |")


def test_pages_are_filled_between_the_marks_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    pages = tmp_path / "README.md", tmp_path / "docs" / "performance.md"
    for page in pages:
        page.write_text(f"before {MARK}old{END} behind")
    partly = Records(tmp_path / "p.json", ABOUT)
    partly.add("small", "one", rows(f"MLP 3x64: {STEP}", {AMP: [1.0]}), minutes=1, commit="c")
    module.fill([partly])
    assert pages[0].read_text() == f"before {MARK}old{END} behind", "not all are measured"
    other = results(tmp_path / "s.json")
    other.about = {**other.about, "processor": "Pascaline 2"}
    module.fill([partly, results(tmp_path / "r.json"), other])
    text = pages[0].read_text()
    start = f"before {MARK}on Abacus 9000, 2 cores, 2 threads, a step has"
    assert text.startswith(f"{start} 0.50 to 0.50 times the speed of Inductor under autocast")
    assert text.endswith(f"that of eager float32{END} behind") and text.count("step") == 1
    machines = re.findall(r"(\S+ \d+), 2 cores, 2 threads:\n\n\| amp", table := pages[1].read_text())
    assert machines == ["Abacus 9000", "Pascaline 2"] and table.count("| MLP 3x64: step |") == 2


def test_ours_is_to_be_no_slower(tmp_path: Path) -> None:
    found = [*targets(results(tmp_path / "r.json"))]
    assert len(found) == 2 * len(MODELS) and {t.promise for t in found} == {f"at least 1.0 times as fast as {BASELINE}"}
    assert not any(t.kept for t in found)


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_the_pages_have_the_marks(page: str) -> None:
    text = (module.ROOT / page).read_text()
    assert len(module.MARKED.findall(text)) == text.count(MARK) == 1
