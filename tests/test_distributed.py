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


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Every case in one pair of processes, which take most of their time to start; empty text where all is well."""
    folder = tmp_path_factory.mktemp("ranks")
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
        outputs = [rank.communicate(timeout=400)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)[-4000:]
    return {**json.loads((folder / "outcomes.json").read_text()), "folder": folder}


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize("name", distributed_ranks.CASES)
def test_it_works_on_two_ranks(outcomes, name):
    assert not outcomes[name], outcomes[name]


@pytest.mark.xdist_group("two processes")
def test_one_process_goes_on_from_the_checkpoint_of_two(outcomes):
    distributed_ranks.load(outcomes["folder"] / "checkpoint")
