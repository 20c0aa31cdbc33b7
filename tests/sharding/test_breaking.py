"""Where one rank breaks off, the others get an error in time; the last checkpoint goes on as if unbroken."""

import json
import re
import subprocess
import sys

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from tests.ranks import ROOT
from tests.sharding.breaking import BREAKS, SIZES, TIMEOUT

CLOSED = "Connection (closed|reset) by peer"
TIMED_OUT = "Timed out waiting"
ENDS = {"killed": (-9, CLOSED), "raises": (1, CLOSED), "silent": (0, f"{TIMED_OUT}|{CLOSED}")}
"""How rank 1 ends, and what the others are told: from the first that times out, others lose a connection."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param("fsdp", marks=pytest.mark.ci)]
    + [pytest.param(k, marks=pytest.mark.slow) for k in ("fsdp4", "hsdp", "fp8")],
)
def test_the_other_ranks_get_an_error_and_the_last_checkpoint_goes_on_with_the_same_bits(kind, tmp_path):
    command = [sys.executable, "-m", "tests.sharding.breaking", str(tmp_path), kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    size = SIZES[kind]
    ends = json.loads((tmp_path / "ends.json").read_text())
    wanted = {how: [0, end, *[0] * (size - 2)] for how, (end, _) in ENDS.items()} | {"resumed": [0] * size}
    assert ends == wanted, done.stdout + done.stderr
    assert "ValueError: no such token" in done.stderr
    for how, (_, message) in ENDS.items():
        saved = max(path.parent for path in (tmp_path / how).glob("*/.metadata"))
        told = [json.loads((tmp_path / f"{how}{rank}.json").read_text()) for rank in range(size) if rank != 1]
        assert saved.name == str(BREAKS[how][0]) and {each["step"] for each in told} == {BREAKS[how][0]}
        assert all(re.search(message, each["error"]) for each in told), told
        assert how != "silent" or any(TIMED_OUT in each["error"] for each in told), told
        latest = max(each["at"] for each in told)
        assert latest - (saved / ".metadata").stat().st_mtime < TIMEOUT + 4, "a step takes a fraction of a second"
