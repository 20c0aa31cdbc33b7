"""The example in docs/audit.md prints what stands below it."""

from pathlib import Path

import pytest
import torch

import ampcompile
from tests import pages

PAGE = "docs/audit.md"


def test_the_example_is_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "118")
    names = pages.run(PAGE)
    found, printed = capsys.readouterr().out, pages.blocks(PAGE)[1].code
    # Numbers differ from machine to machine, and ties are broken by them.
    above = slice(0, 7)
    assert found.splitlines()[above] == printed.splitlines()[above]
    modules = [line.split()[:2] for line in found.splitlines()[8:14]]
    assert modules == [line.split()[:2] for line in printed.splitlines()[8:14]]
    assert str(names["policy"]) == "module energy=fp32"
    assert names["audit"].sensitivities().rows[0].keep == "op square@energy=fp32"
    again = ampcompile.audit(names["model"], dtype=torch.float16, policy=names["policy"])(names["x"])
    assert again.error == pytest.approx(0.0013, rel=0.5)
