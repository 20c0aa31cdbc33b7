"""Two processes (gloo): DDP and FSDP2 give what one process gives, skip together, and checkpoints move both ways."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

from tests import distributed_ranks

ROOT = Path(__file__).parents[1]


def outcomes(folder):
    """What went wrong in each case, empty text where all is well. One pair of processes runs them all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CHECKPOINT": str(folder / "checkpoint"),
    }
    command = [sys.executable, "-m", "tests.distributed_ranks", str(folder / "outcomes.json")]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **world, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=550)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)[-4000:]
    return json.loads((folder / "outcomes.json").read_text())


def test_two_ranks_do_what_one_process_does_and_one_goes_on_from_their_checkpoint(tmp_path):
    found = outcomes(tmp_path)
    assert found.keys() == distributed_ranks.CASES.keys()
    wrong = {name: text for name, text in found.items() if text}
    assert not wrong, "\n".join([", ".join(wrong), *wrong.values()])
    distributed_ranks.load(tmp_path / "checkpoint")
