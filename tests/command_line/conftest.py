"""A module of factories, as a user of the command line has one."""

from pathlib import Path

import pytest

FACTORIES = """
import torch
from torch import nn

def model(): return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), (torch.randn(4, 8),)
def function(): return (lambda x, scale: x @ x.mT * scale), [torch.randn(4, 8)], {"scale": 2.0}
def overflowing(): return (lambda x: x * 6e4 * 6e4 @ x.mT), (torch.ones(4, 8).half(),)
def number(): return 3
def four(): return 1, 2, 3, 4
def not_callable(): return 1, ()
def one_tensor(): return nn.Linear(8, 8), torch.randn(4, 8)
def no_keywords(): return abs, (1,), []
def needs_arguments(width): return model()
def wrong_shape(): return nn.Linear(8, 8), (torch.randn(4, 7),)
def breaks(): raise ZeroDivisionError("the factory's own")
def breaks_in_torch(): return nn.Linear("8", 8), ()
instance = nn.Linear(8, 8)
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"shop_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name
