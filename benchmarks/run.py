"""Measures, stage by stage and job by job, and keeps what is done."""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from benchmarks import machine
from benchmarks.apart import FailedError
from benchmarks.peers import AMP, PEERS
from benchmarks.records import RESULTS, Records, Row, spread
from benchmarks.runner import Job, run
from benchmarks.stages import Setup, sow, stages


def parser() -> argparse.ArgumentParser:
    """The options of a measurement."""
    found = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    found.add_argument("stages", nargs="*", metavar="STAGE", help="which; all by default, and --list names them")
    found.add_argument("--list", action="store_true", help="print the stages and their jobs")
    found.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    found.add_argument("--out", type=Path, help="where to; by default a file in benchmarks/results/ named by machine")
    found.add_argument("--resume", action="store_true", help="leave out jobs that the file holds already")
    found.add_argument(
        "--minutes", type=float, default=0.0, help="stop after so many (0: never); a job cut off is left to do"
    )
    found.add_argument("--budget", type=float, default=10.0, help="seconds to time one case (default %(default)s)")
    found.add_argument("--together", action="store_true", help="peers compile at the same time: no compile times")
    found.add_argument("--tiny", action="store_true", help="tiny models: tries everything, the times mean nothing")
    found.add_argument("--rehearse", action="store_true", help="the jobs of --device cuda, tiny, on the CPU")
    return found


def main(arguments: list[str]) -> int:
    """Run the jobs asked for; 1 if some were left for `--resume`."""
    options = parser().parse_args(arguments)
    plan = "cuda" if options.rehearse else options.device
    options.device, options.tiny = ("cpu", True) if options.rehearse else (options.device, options.tiny)
    if options.device == "cuda" and not (options.list or torch.cuda.is_available()):
        parser().error(
            f"--device cuda: torch {torch.__version__} sees no CUDA device; "
            "--list names what would be measured, --rehearse --out FILE tries it on the CPU"
        )
    if options.tiny and not (options.out or options.list):
        parser().error("--tiny and --rehearse need --out: their times don't belong among the results")
    with TemporaryDirectory() as seed:
        setup = Setup(options.device, plan, options.budget, options.tiny, Path(seed), options.together)
        known = stages(setup)
        if options.list:
            print("\n".join(f"{stage}: {'; '.join(jobs)}" for stage, jobs in known.items()))
            return 0
        if unknown := set(options.stages) - set(known):
            parser().error(f"no stage is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        chosen = [(stage, job) for stage in options.stages or known for job in known[stage]]
        records = opened(options, chosen)
        jobs = [
            Job(records, stage, job, partial(measured, job, known[stage][job]))
            for stage, job in chosen
            if job not in records.stages.get(stage, {})
        ]
        left = run(jobs, options.minutes, partial(sow, setup))
    print(records.path, f"lacks {left} jobs: run again with --resume" if left else "is complete")
    return int(bool(left))


def opened(options: argparse.Namespace, chosen: list[tuple[str, str]]) -> Records:
    """The file of results, without those that are to be measured now."""
    about = machine.about(options.device) | {"peers": {name: peer.settings() for name, peer in PEERS.items()}}
    path = options.out or RESULTS / f"{machine.slug(about)}.json"
    if not path.exists():
        return Records(path, about)
    records = Records.load(path)
    if changed := {key for key in records.about.keys() | about if records.about.get(key) != about.get(key)}:
        if options.resume or options.stages:
            parser().error(f"{path} was measured with another {', '.join(sorted(changed))}: name another file by --out")
        return Records(path, about)
    if not options.resume:
        for stage, job in chosen:
            records.stages.get(stage, {}).pop(job, None)
    return records


def measured(job: str, work: Callable[[], list[Row]]) -> tuple[dict[str, Any], list[str]]:
    """The rows of a job, how long it took, and the gist."""
    started, load = perf_counter(), os.getloadavg()[0]
    try:
        rows = work()
    except FailedError as error:
        rows = [Row(job, AMP, why=str(error))]
    minutes = (perf_counter() - started) / 60
    told = [f"{minutes:.1f} minutes", *(f"{row.case}, {row.peer}: {row.why or describe(row)}" for row in rows)]
    return {"rows": rows, "minutes": minutes, "commit": machine.commit(), "load": load}, told


def describe(row: Row) -> str:
    """Median and quartiles, in milliseconds."""
    low, middle, high = (1e3 * value for value in spread(row.figures["seconds"]))
    return f"{middle:.4g} ms ({low:.4g} to {high:.4g})"
