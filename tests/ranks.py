"""Processes that train together: how they are started, and how they find each other."""

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parents[1]


def run_ranks(
    module: str, *args: str, folder: Path, timeout: float, flags: tuple[str, ...] = (), size: int = 2
) -> None:
    """Runs ``python -m module args`` as ranks 0 and 1 (or `size`), who meet over a file: a free port may be taken a
    moment later.

    At the timeout (seconds) all are aborted, and say where they stood.
    """
    world = {
        "WORLD_SIZE": str(size),
        "RENDEZVOUS": str(folder / "rendezvous"),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, *flags, "-m", module, *args],
            cwd=ROOT,
            env={**os.environ, **world, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    deadline = threading.Timer(timeout, lambda: [rank.send_signal(signal.SIGABRT) for rank in ranks])
    deadline.start()
    outputs = [rank.communicate()[0] for rank in ranks]
    deadline.cancel()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(outputs)[-4000:]


def join(timeout: timedelta | None = None) -> None:
    """Makes this process one of the ranks; `timeout`: how long one waits for another."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = f"file://{os.environ['RENDEZVOUS']}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timeout)


def leave() -> None:
    """Ends this process well, without torch's teardown: there gloo's threads abort one in some hundred of them."""
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
