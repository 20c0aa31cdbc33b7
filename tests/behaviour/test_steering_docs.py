"""The snippets of the pages about explaining and steering run as written, one after the other."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import ampcompile
from examples.steering.imported_pooling import RoIPool

DOCS = Path(__file__).parents[2] / "docs"
HIGH = torch.float32


def run(page: str, **names: Any) -> dict[str, Any]:
    """What is defined after all of a page's snippets."""
    names |= {"ampcompile": ampcompile, "torch": torch, "__name__": "snippets"}
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)):
        exec(compile(snippet, f"{page}, snippet {number}", "exec"), names)
    return names


def test_explaining(capsys: pytest.CaptureFixture[str]) -> None:
    found = run("explain.md", model=nn.Linear(4, 4), x=torch.randn(2, 4))
    assert "hoisted" in capsys.readouterr().out
    record = (DOCS / "explain.md").read_text()
    for name in re.findall(r"`report\.(\w+)", record):
        assert hasattr(found["report"], name)
    for name in ("op", "module", "source", "dtype_from", "dtype_to", "shape", "bytes", "because", "fate", "of", "runs"):
        assert hasattr(found["report"].casts[0], name) and f"`{name}`" in record


def test_steering(monkeypatch: pytest.MonkeyPatch) -> None:
    vision, ops = ModuleType("torchvision"), ModuleType("torchvision.ops")
    ops.RoIPool = RoIPool
    monkeypatch.setitem(sys.modules, "torchvision", vision)
    monkeypatch.setitem(sys.modules, "torchvision.ops", ops)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    with torch.library._scoped_library("mylib", "FRAGMENT") as library:
        library.define("attention(Tensor x) -> Tensor")
        library.impl("attention", torch.clone, "CompositeExplicitAutograd")
        library.impl("attention", torch.empty_like, "Meta")
        found = run("steering.md", model=model, x=x)
    policy = found["policy"]
    assert ampcompile.Policy.parse(str(policy)) == policy
    with torch.autocast("cpu"):
        assert [layer(x).dtype for layer in model] == [HIGH, torch.float16, torch.bfloat16]
        assert found["distance"](x, x).dtype == found["Energy"]()(x).dtype == HIGH
        rois = torch.tensor([[0, 0, 0, 2, 2]])
        for pool in (found["RoIPool32"], found["MyRoIPool"]):
            assert pool(2, 1.0)(torch.randn(1, 3, 4, 4, dtype=torch.float16), rois).dtype == HIGH
    assert found["y"].dtype == HIGH
