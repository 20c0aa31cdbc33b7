"""`make test OFF_BY_ONE=1`: what it makes of the CPU's functions, beside a process without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.test_layout import ROOT

NAMES = ("cos", "exp", "log", "sin", "sqrt", "tanh")
SCRIPT = """
import sys, torch
x = torch.load(sys.argv[1])
def three(fn, name, x):
    return fn(x), getattr(x.clone(), name + "_")(), fn(x, out=torch.empty_like(x))
torch.save({name: [three(getattr(torch, name), name, x.to(dtype)) for dtype in (torch.float32, torch.bfloat16)]
            for name in sys.argv[3:]}, sys.argv[2])
"""
EDGES = [0.0, -0.0, 1.0, 4.0, 9.0, 3e38, -3e38, 88.72, -103.0, 20.0, -20.0, 1e-40, torch.inf, -torch.inf, torch.nan]


@pytest.mark.ci
def test_every_fifth_result_that_is_not_exact_moves_by_one(tmp_path: Path) -> None:
    x, found = torch.cat([torch.tensor(EDGES), 3 * torch.randn(2000)]), []
    torch.save(x, tmp_path / "x")
    for way in ("", str(ROOT / "tests" / "off_by_one")):
        command = [sys.executable, "-P", "-W", "error", "-c", SCRIPT, tmp_path / "x", tmp_path / "y", *NAMES]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": way}, check=True, timeout=300)
        found.append(torch.load(tmp_path / "y"))
    for name in NAMES:
        (before, low), (after, low_after) = found[0][name], found[1][name]
        assert all(same(a, b) for a, b in zip(low, low_after, strict=True)), name
        assert all(same(after[0], y) for y in after), "as functions, in place and into `out=`"
        y, other = before[0], after[0]
        fixed = (
            ~y.isfinite() | (y == 0) | (x == 0) | (x == 1) & (name == "log") | (y.double() ** 2 == x) & (name == "sqrt")
        )
        moves = (x.view(torch.int32) % 5 == 0) & ~fixed
        assert moves.sum() > 100 and torch.equal((y.view(torch.int32) - other.view(torch.int32)).abs(), moves.int())
        assert name not in ("cos", "sin", "tanh") or not (other.abs() > 1).any()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
