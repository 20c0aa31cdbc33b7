"""Processes that train together: how they are started, and how they find each other."""

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path

import torch
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


def run_cases(cases: dict[str, Callable[[], object]], of_four: Collection[str] = ()) -> None:
    """What a rank of `outcomes` does. The arguments are a folder, and which cases; without, all for so many ranks."""
    join()
    here = {name for name in cases if (name in of_four) == (dist.get_world_size() == 4)}
    chosen = {name: run for name, run in cases.items() if name in (sys.argv[2:] or here)}
    told = {}
    for name, run in chosen.items():
        torch._dynamo.reset()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
                run()
            told[name] = ""
        except Exception:
            told[name] = f"rank {dist.get_rank()}: {traceback.format_exc()}"
            print(name, told[name], flush=True)
        dist.barrier()
    gathered = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, told)
    if dist.get_rank() == 0:
        joined = {name: "".join(each[name] for each in gathered) for name in chosen}
        Path(sys.argv[1], "outcomes.json").write_text(json.dumps(joined))
    leave()


def assert_all_pass(module: str, folder: Path, wanted: Collection[str], *names: str, size: int = 2) -> None:
    """Run the cases of a module in one group of processes: those of these names, or all."""
    run_ranks(module, str(folder), *names, folder=folder, timeout=580, size=size)
    found = json.loads((folder / "outcomes.json").read_text())
    wrong = {name: text for name, text in found.items() if text}
    assert found.keys() == {*wanted} and not wrong, "\n".join([", ".join(wrong), *wrong.values()])
