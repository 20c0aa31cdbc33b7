"""The example in docs/audit.md prints what stands below it."""

import re
import runpy
from pathlib import Path

import pytest
import torch

import ampcompile

PAGE = Path(__file__).parents[2] / "docs" / "audit.md"


def test_the_example_is_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "118")
    example, printed = re.findall(r"```(?:python)?\n(.*?)```", PAGE.read_text(), re.S)[:2]
    (tmp_path / "example.py").write_text(example)
    names = runpy.run_path(str(tmp_path / "example.py"))
    found = capsys.readouterr().out
    # Numbers differ from machine to machine, and ties are broken by them.
    above = slice(0, 5)
    assert found.splitlines()[above] == printed.splitlines()[above]
    modules = [line.split()[:2] for line in found.splitlines()[6:12]]
    assert modules == [line.split()[:2] for line in printed.splitlines()[6:12]]
    policy = names["audit"].suggest(5e-3)
    assert str(policy) == "module energy=fp32"
    again = ampcompile.audit(names["model"], dtype=torch.float16, policy=policy)(names["x"])
    assert again.error == pytest.approx(0.0013, rel=0.5)
