"""The README's picture shows the models that every peer ran on one CPU, and no others."""

from pathlib import Path

import pytest

from benchmarks.peers import AMP, BASELINE
from benchmarks.records import Records
from tests.benchmarks.made_up import ABOUT, rows

pytest.importorskip("matplotlib")


def test_models_that_all_ran_on_the_first_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.report import plot as module

    times = {"eager autocast": [4.0, 4.0], BASELINE: [2.0, 2.0], AMP: [1.0, 1.0]}
    files = [
        Records(tmp_path / f"{name}.json", {**ABOUT, "device": device, "processor": name})
        for name, device in (("gpu", "cuda"), ("first", "cpu"), ("second", "cpu"))
    ]
    for records in files:
        records.add("inference", "job", rows(f"all on {records.about['processor']}", times))
        records.add("training", "job", rows("two", {AMP: [1.0, 1.0], BASELINE: [2.0, 2.0]}))
    assert {case: peers[AMP].middle for case, peers in module.summary(files).items()} == {"all on first": 2.0}
    monkeypatch.setattr(module, "PICTURE", tmp_path / "pictures" / "speed.svg")
    module.draw_summary(files[:1])
    assert not module.PICTURE.exists(), "no CPU was measured"
    module.draw_summary(files)
    assert module.PICTURE.read_text().count("<path") > 10
    text = module.PICTURE.read_text()
    assert ">Speed in bfloat16 on first, 2 cores: the further right, the faster<" in text
    assert ">1x16: one sequence of 16 tokens" in text and ">2.00x<" in text
