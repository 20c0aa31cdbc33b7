"""What `TORCH_LOGS` and `TORCH_TRACE` show, and that nothing is prepared when nobody listens."""

import json
import logging
import os
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.models import Net

SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
torch.compile(model, backend="amp", options={"lower": "eager"})(torch.randn(2, 4))
"""


def compile_something() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    torch.compile(model, backend="amp", options={"lower": "eager"})(torch.randn(2, 4))


def test_a_line_per_graph_and_every_decision_and_cast(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ampcompile")
    compile_something()
    records = [record for record in caplog.records if record.name == "ampcompile"]
    (line,) = [record.getMessage() for record in records if record.levelno == logging.INFO]
    assert line.startswith("cpu in bf16, 2 ops, 3 casts (2 hoisted), capture ")
    assert " ms, assign_precision " in line and " ms, insert_casts " in line
    found = [record.getMessage() for record in records]
    assert any(line.startswith("aten.linear in bf16: on autocast's lower_precision_fp list (CPU)") for line in found)
    assert "aten.softmax in bf16: autocast leaves it alone: runs in the dtypes that arrive [1]" in found
    casts = [line for line in found if line.startswith("cast of")]
    assert len(casts) == 3
    assert casts[1].startswith("cast of weight 4x4 f32>bf16 for aten.linear, 96 bytes, inserted+hoisted [0]")
    assert any(line.startswith("insert_casts: 3 rewrites, ") for line in found)


def test_from_the_environment_without_importing_the_package(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_LOGS": "+ampcompile", "TORCH_TRACE": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert "cast of weight 4x4" in run.stderr
    (trace,) = tmp_path.glob("*.log")
    artifacts = {}
    entries = trace.read_text().splitlines()
    for number, entry in enumerate(entries):
        metadata = json.loads(entry[entry.index("{") :]) if entry[:1] == "V" and "{" in entry else {}
        if metadata.get("artifact", {}).get("name", "").startswith("ampcompile"):
            payload = takewhile(lambda line: line.startswith("\t"), entries[number + 1 :])
            artifacts[metadata["artifact"]["name"]] = "\n".join(line[1:] for line in payload)
            assert metadata["frame_id"] == 0
    assert "def forward" in artifacts["ampcompile_graph"] and "bf16[2, 4]" in artifacts["ampcompile_graph"]
    casts = json.loads(artifacts["ampcompile_casts"])
    assert [cast["dtype_to"] for cast in casts] == ["bf16"] * 3


def test_a_model_of_which_dynamo_makes_no_graph_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ampcompile")
    run = torch.compile(Net(lambda m, x: m.cells(x)[0], cells=nn.GRU(4, 4)), backend="amp", options={"lower": "eager"})
    for _ in range(2):
        run(torch.randn(3, 2, 4))
    for _ in range(2):  # the second finds its graph made
        compile_something()
    (line,) = [record.getMessage() for record in caplog.records if "no graph" in record.getMessage()]
    assert line.startswith("Dynamo made no graph of Net, which runs eagerly under autocast: ")
    assert "RNN" in line or "Unsupported function call" in line
