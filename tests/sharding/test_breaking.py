"""Where one rank breaks off, the other gets an error within the timeout; the last checkpoint goes on as if unbroken."""

import json
import re
import subprocess
import sys

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from tests.ranks import ROOT
from tests.sharding.breaking import BREAKS, TIMEOUT

CLOSED = "Connection (closed|reset) by peer"
ENDS = {"killed": ([0, -9], CLOSED), "raises": ([0, 1], CLOSED), "silent": ([0, 0], "Timed out waiting")}
"""How the ranks end, and what rank 0 is told."""


@pytest.mark.ci
def test_the_other_rank_gets_an_error_and_the_last_checkpoint_goes_on_with_the_same_bits(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.sharding.breaking", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    ends = json.loads((tmp_path / "ends.json").read_text())
    assert ends == {how: end for how, (end, _) in ENDS.items()} | {"resumed": [0, 0]}, done.stdout + done.stderr
    assert "ValueError: no such token" in done.stderr
    for how, (_, told) in ENDS.items():
        last, saved = json.loads((tmp_path / f"{how}.json").read_text()), max((tmp_path / how).iterdir())
        assert re.search(told, last["error"]) and (last["step"], saved.name) == (BREAKS[how][0], str(BREAKS[how][0]))
        assert last["at"] - (saved / ".metadata").stat().st_mtime < TIMEOUT + 4, "a step takes a fraction of a second"
