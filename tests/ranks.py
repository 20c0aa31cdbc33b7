"""Processes that train together: how they are started, and how they find each other."""

import atexit
import faulthandler
import functools
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]


def run_ranks(module: str, *args: str, folder: Path, timeout: float, errors: bool = False, size: int = 2) -> None:
    """Runs ``python -m module args`` as ranks 0 and 1 (or `size`), who meet over a file: a free port may be taken a
    moment later. `errors`: warnings are errors.

    At the timeout (seconds) all are aborted, and say where they stood.
    """
    world = {"WORLD_SIZE": str(size), "RENDEZVOUS": str(folder / "rendezvous"), "OMP_NUM_THREADS": "1"}
    order = {"argv": [module, *args], "folder": str(folder), "size": size, "errors": errors}
    answers = nursery().ask(order | {"environ": {**os.environ, **world}})
    ranks = next(answers)
    deadline = threading.Timer(timeout, lambda: [os.kill(rank, signal.SIGABRT) for rank in ranks])
    deadline.start()
    codes = next(answers)
    deadline.cancel()
    outputs = [(folder / f"output{rank}.txt").read_text() for rank in range(size)]
    assert codes == [0] * size, "\n".join(outputs)[-4000:]


class Nursery:
    """A process that has imported torch, and forks ranks: each would need five seconds for that alone."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.ranks"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}  # no library begins threads, which no fork has
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self.process.communicate)  # it ends when nobody can ask any more

    def ask(self, order: dict[str, Any]) -> Iterator[list[int]]:
        """The ranks' process ids, then their exit codes."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)
        yield json.loads(self.process.stdout.readline())
        yield json.loads(self.process.stdout.readline())


nursery = functools.cache(Nursery)


def serve() -> None:
    """What the nursery does until nobody asks any more."""
    for module in ("torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.checkpoint"):
        importlib.import_module(module)
    for line in sys.stdin:
        order = json.loads(line)
        ranks = [os.fork() or be_rank(rank, **order) for rank in range(order["size"])]
        print(json.dumps(ranks), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]), flush=True)


def be_rank(rank: int, argv: list[str], folder: str, size: int, errors: bool, environ: dict[str, str]) -> NoReturn:
    """Run a module as a process of its own would, and end."""
    output = os.open(f"{folder}/output{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    os.environ.update(environ, RANK=str(rank))
    sys.argv = argv
    code = 1
    try:
        if errors:
            warnings.simplefilter("error")
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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


if __name__ == "__main__":
    serve()
