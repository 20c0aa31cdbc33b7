"""The snippets of the pages about explaining and steering run as written, one after the other."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import ampcompile
from examples.steering.imported_pooling import RoIPool
from tests import pages

HIGH = torch.float32


def test_explaining(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"ampcompile": ampcompile, "torch": torch, "model": nn.Linear(4, 4)}
    pages.run("docs/explain.md", x=torch.randn(2, 4), **given)
    assert capsys.readouterr().out.startswith("amp removes")


def test_steering(monkeypatch: pytest.MonkeyPatch) -> None:
    vision, ops = ModuleType("torchvision"), ModuleType("torchvision.ops")
    ops.RoIPool = RoIPool
    monkeypatch.setitem(sys.modules, "torchvision", vision)
    monkeypatch.setitem(sys.modules, "torchvision.ops", ops)
    with torch.library._scoped_library("mylib", "FRAGMENT") as library:
        library.define("attention(Tensor x) -> Tensor")
        library.impl("attention", torch.clone, "CompositeExplicitAutograd")
        library.impl("attention", torch.empty_like, "Meta")
        found = pages.run("docs/options.md", ampcompile=ampcompile)
    policy, model, x = found["policy"], found["model"], found["x"]
    assert ampcompile.Policy.parse(str(policy)) == policy
    with torch.autocast("cpu"):
        assert [layer(x).dtype for layer in model] == [HIGH, torch.float16, torch.bfloat16]
        assert found["distance"](x, x).dtype == found["Energy"]()(x).dtype == HIGH
        rois = torch.tensor([[0, 0, 0, 2, 2]])
        for pool in (found["RoIPool32"], found["MyRoIPool"]):
            assert pool(2, 1.0)(torch.randn(1, 3, 4, 4, dtype=torch.float16), rois).dtype == HIGH
    assert found["y"].dtype == HIGH
