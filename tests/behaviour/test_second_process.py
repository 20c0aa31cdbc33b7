"""A second process finds what the first one compiled: both of Inductor's caches hit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json
import torch
from torch import nn
from torch._dynamo.utils import counters

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
compiled = torch.compile(model, backend="amp")
x = torch.randn(3, 8)
out = compiled(x)
out.float().square().sum().backward()
with torch.no_grad():
    plain = compiled(x)
inductor, aot = counters["inductor"], counters["aot_autograd"]
print(json.dumps({
    "fxgraph": [inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"], inductor["fxgraph_cache_bypass"]],
    "autograd": [aot["autograd_cache_hit"], aot["autograd_cache_miss"], aot["autograd_cache_bypass"]],
    "out": out.flatten().tolist(), "same": torch.equal(out, plain),
    "grads": [p.grad.abs().sum().item() for p in model.parameters()],
}))
"""


def run(cache: Path) -> dict:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True, timeout=500
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_caches_hit(tmp_path: Path) -> None:
    first, second = run(tmp_path), run(tmp_path)
    for kind in ("fxgraph", "autograd"):
        assert first[kind][2] == second[kind][2] == 0, "no graph is too odd to be cached"
        assert first[kind][1] > 0, "the first process compiles"
        assert second[kind][0] > 0
        assert second[kind][1] == 0, "the second one finds everything"
    assert first["out"] == second["out"]
    assert first["grads"] == second["grads"]
    assert first["same"]
    assert all(g > 0 for g in second["grads"])
