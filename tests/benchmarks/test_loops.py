"""A step's loops have their times beside what their bytes would take."""

import os
from functools import partial

import pytest
import torch

from benchmarks import loops as module
from benchmarks.kernel_cases import Kernel
from benchmarks.loops import MATRICES, REST, ROUNDS, STEP, measure
from benchmarks.peers import AMP
from benchmarks.report.tables import loops_table
from benchmarks.works import CLIPPED, Work, tiny


def test_the_parts_of_a_step_have_times_calls_and_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 64)
    kernels = [
        Kernel("copy", 2 * x.nbytes, 0, {"torch": x.clone}),
        Kernel("mm", 0, 2 * 64**3, {"torch": partial(x.mm, x)}),
    ]
    monkeypatch.setattr(module, "limits", lambda device: kernels)
    monkeypatch.setattr(module, "LEAST", 0.0)
    rows = measure(tiny(Work("GPT 23M", 2, 8, (AMP,), (CLIPPED,), keeps_memory=True)))
    found = {row.case: row.figures for row in rows}
    assert rows[0].case == STEP and all(len(row.figures["seconds"]) == ROUNDS for row in rows)
    loops = [figures for name, figures in found.items() if name.startswith("cpp_fused")]
    assert len(loops) > 3 and all(figures["bound_seconds"][0] > 0 and figures["calls"] >= 1 for figures in loops)
    assert found[MATRICES]["bound_seconds"][0] > 0 and found[MATRICES]["calls"] > 3
    assert sum(found[REST]["seconds"]) == 0, "each has a row of its own, if a moment is enough"
    text = loops_table({row.case: {AMP: row} for row in rows})
    assert text.count("\n") == len(rows) + 2 and "%" in text


def test_a_process_is_told_to_keep_memory_by_its_environment() -> None:
    kept, given = (Work("GPT 23M", 2, 8, (AMP,), keeps_memory=keeps).environment for keeps in (True, False))
    assert not given and kept.keys() >= {"MALLOC_TRIM_THRESHOLD_"} and not kept.keys() & os.environ.keys()
