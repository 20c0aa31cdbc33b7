"""Ranks skip together: an overflow on one is an overflow on all, under FSDP2 and DDP."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
@pytest.mark.parametrize(("kind", "how"), [("AdamW", "clip_grad_norm_"), ("SGD", "step"), ("RMSprop", "unscale_")])
def test_all_ranks_skip_when_one_overflows(wrapper, kind, how):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "error", "-m", "tests.scaler_ranks", wrapper, kind, how]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
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
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)[-4000:]
