"""What people use torch.compile with by torch's own names works with the backend too."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.compiling import eager, same_bits

COMPILE = """
import json, sys, torch
from torch import nn
from torch._dynamo.utils import counters
lower, file, what = *sys.argv[1:], *(3 - len(sys.argv[1:])) * [""]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
compiled, x = torch.compile(model, backend="amp", options={"lower": lower}), torch.randn(3, 4)
if what == "load":
    torch.compiler.load_cache_artifacts(open(file, "rb").read())
out = compiled(x)
out.square().sum().backward()
with torch.no_grad():
    assert torch.equal(out, compiled(x))
if what == "save":
    open(file, "wb").write(torch.compiler.save_cache_artifacts()[0])
inductor, aot = counters["inductor"], counters["aot_autograd"]
print(json.dumps({
    "fxgraph": [inductor[f"fxgraph_cache_{of}"] for of in ("hit", "miss", "bypass")],
    "autograd": [aot[f"autograd_cache_{of}"] for of in ("hit", "miss", "bypass")],
    "numbers": [out.tolist(), *(p.grad.tolist() for p in model.parameters())],
}))
"""


def run(lower: str, *arguments: object, **environment: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", COMPILE, lower, *map(str, arguments)]
    environment = os.environ | {name: str(value) for name, value in environment.items()}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=500)


def test_the_backend_is_listed() -> None:
    assert "amp" in torch._dynamo.list_backends()


@pytest.mark.ci
def test_torch_logs_takes_our_name_and_the_structured_trace_can_be_parsed(tmp_path: Path) -> None:
    """By tlparse too, where it is installed."""
    said = run("aot_eager", TORCH_LOGS="+ampcompile", TORCH_TRACE=tmp_path).stderr
    assert re.search(r"DEBUG.*aten\.linear in bf16: on autocast's|^V.*aten\.linear in bf16: on autocast's", said, re.M)
    assert "cast of weight 4x4 f32>bf16 for aten.linear" in said
    (log,) = tmp_path.glob("*.log")
    records = re.findall(r"^V\d{4} .*?\] (\{.*\})\n((?:\t.*\n)*)", log.read_text(), re.MULTILINE)
    parsed = [(json.loads(about), payload) for about, payload in records]
    artifacts = {about["artifact"]["name"]: payload for about, payload in parsed if "artifact" in about}
    assert "weight_copy" in artifacts["ampcompile_graph"]
    casts = json.loads(re.sub("^\t", "", artifacts["ampcompile_casts"], flags=re.MULTILINE))
    assert {cast["op"] for cast in casts} == {"aten.linear"}
    if tlparse := shutil.which("tlparse"):
        subprocess.run([tlparse, log, "-o", tmp_path / "parsed", "--no-browser"], check=True, timeout=100)
        assert list((tmp_path / "parsed").rglob("ampcompile_casts*"))


def test_stances() -> None:
    """Forced to eager mode, it runs under autocast, and gives the same."""
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x, graphs = torch.randn(2, 4), torch._dynamo.utils.counters["stats"]
    compiled = torch.compile(model, backend="amp", options={"lower": "eager"})
    with torch.compiler.set_stance("force_eager"):
        forced = compiled(x)
        assert graphs["unique_graphs"] == 0
    assert same_bits(forced, compiled(x)) and same_bits(forced, eager(model, x).float())
    assert graphs["unique_graphs"] == 1
    wider = torch.randn(3, 2, 4)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert same_bits(compiled(x), forced)
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            compiled(wider)
    with torch.compiler.set_stance("eager_on_recompile"):
        assert same_bits(compiled(wider), eager(model, wider).float())
        assert graphs["unique_graphs"] == 1


@pytest.mark.parametrize(
    "here", [pytest.param(False, marks=pytest.mark.ci), pytest.param(True, marks=pytest.mark.slow)]
)
def test_a_second_process_finds_what_the_first_compiled_on_another_machine_too(here: bool, tmp_path: Path) -> None:
    """There, as artifacts of the caches, which are then found as where they were made."""

    def caches_and_numbers(folder: str, what: str) -> dict[str, Any]:
        found = run("inductor", tmp_path / "file", what, TORCHINDUCTOR_CACHE_DIR=tmp_path / folder)
        return json.loads(found.stdout.splitlines()[-1])

    first = caches_and_numbers("first", "save")
    second = caches_and_numbers("first", "") if here else caches_and_numbers("second", "load")
    for kind in ("fxgraph", "autograd"):
        hits, misses, bypassed = zip(first[kind], second[kind], strict=True)
        assert bypassed == (0, 0), "no graph is too odd to be cached"
        assert misses[0] > 0 and misses[1] == 0 and hits[1] > 0, kind
    assert first["numbers"] == second["numbers"]
