"""docs/benchmarks.md, written from the result files."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks.records import RESULTS, Records
from benchmarks.report.growth import facts
from benchmarks.report.plot import draw, draw_summary
from benchmarks.report.roofline import measured_limits
from benchmarks.report.small import fill, small_table
from benchmarks.report.tables import case_table, loops_table, table, unable
from benchmarks.report.targets import losses, targets

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

<!-- Written by `python -m benchmarks docs` from the files in benchmarks/results/: change those, or the generator. -->

Every number is from a run of `make bench` or `make bench-gpu` on the machine named above it, and every ratio compares
two peers in the same run. Each peer has a process of its own, its own copy of the model with the same random weights,
and empty compiler caches but for what a compiler builds once per machine. After warm-up the peers take turns, round by
round; a time is the median over the rounds, with quartiles in brackets, and a ratio the median of the rounds' ratios.
"Error" is the relative distance from eager float32, of the output in inference and of all gradients in training: a
peer that should run in low precision and shows none is not counted. "Casts" are those in the graphs that Inductor
lowers, forward and backward once, and the bytes they would read and write were each a kernel of its own; refreshing
kept copies of weights after an update isn't among them. Memory is the process's peak while it is timed. The training
step is AdamW with torch's fused kernels, always on the same batch, and dropout is off; a later case of the same model
goes on with the weights that the case before left, when peers have grown apart. `Inductor, converted` is the
model in bfloat16 as a whole, the practical limit of speed: it isn't mixed precision, and trains worse.

Small models are trained as most users write it: torch's Adam or AdamW as it comes, no scaler. Each step or call is
timed by itself, a round's time is the median of its steps, and brackets in the first table are the least and the most
of seven rounds. "Small models" has all peers in one process, where the hooks that amp adds to every optimizer's step
slow all of them; in processes of their own they slow amp alone.

On a GPU the time that kernels and copies take there, added up, is given as well ("on the GPU"): what is left of a step
where the host is never late. An H200 has run a part of the stages: what it decided, and what is left to decide, is in
[gpu_decisions.md](gpu_decisions.md).
"""
TITLES = {
    "broken": "Whether everything runs, on a tiny GPT",
    "published": "Figures that others published",
    "inference": "Inference",
    "training": "Training step",
    "scaler": "The step of GradScaler and optimizer",
    "compiled-steps": "The step beside Inductor's code for it",
    "memory": "Memory of a training step",
    "compile": "Compile time",
    "import": "Import time",
    "small": "Small models",
    "loops": "The training step, loop by loop",
    "growth": "Growth",
    "kernels": "Kernels",
    "older-cpus": "Older CPUs: this one, with its 16-bit units switched off",
}


def page(files: list[Records]) -> str:
    """The whole document."""
    return HEAD + "".join(f"\n{part}" for records in files for part in chapter(records))


def chapter(records: Records) -> Iterator[str]:
    """The chapter about one machine's results."""
    about = records.about
    yield f"## {about.get('gpu', about['processor'])}\n"
    yield hardware(records)
    yield promises(records)
    limits, pictures = measured_limits(records), draw(records)
    share = {"of the copy's bandwidth": limits.share} if limits else {}
    for stage in records.stages:
        yield f"### {TITLES.get(stage, stage.replace('-', ', ').capitalize())}\n"
        if stage in pictures:
            yield f"![{stage}]({os.path.relpath(pictures[stage], PAGE.parent)})\n"
        cases = records.cases(stage)
        if stage == "growth":
            yield facts(cases)
        if stage == "small":
            yield small_table(cases)
        if stage == "kernels":
            yield f"{limits}\n"
        if stage == "loops":
            yield loops_table(cases)
            continue
        for case, rows in cases.items():
            if stage != "growth" and set(rows) != {"torch"} and not all(row.why for row in rows.values()):
                yield f"#### {case}\n"
                yield case_table(rows, **share)
        if missing := unable(cases.values()):
            yield missing


def hardware(records: Records) -> str:
    """The hardware, the versions and the time that the run took."""
    about = records.about
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items() if version)
    commits = ", ".join(sorted({job["commit"] for jobs in records.stages.values() for job in jobs.values()}))
    minutes = sum(job["minutes"] for jobs in records.stages.values() for job in jobs.values())
    low = ", ".join(about["low-precision instructions"]) or "no instructions for 16-bit products"
    return (
        f"{about['processor']}, {about['cores']} cores, {about['threads']} threads, "
        f"{about['memory_bytes'] / 2**30:.0f} GiB, {low}; {about['system']}, Python {about['python']}, {packages}, "
        f"{about['compiler']}. Commit {commits}; {minutes:.0f} minutes.\n"
    )


def promises(records: Records) -> str:
    """Targets and losses, kept or not."""
    told: dict[tuple[str, ...], list[str]] = {}
    for t in targets(records):
        verdict = ("yes",) if t.kept else ("**no**", t.case)  # each one that is missed has a row
        told.setdefault((t.promise, f"{t.measured:.3g}", *verdict), []).append(t.case)
    kept = [
        (promise, cases[0] if len(cases) == 1 else f"{len(cases)} cases", measured, verdict)
        for (promise, measured, verdict, *_), cases in told.items()
    ]
    lost = [(f"{x.case}: {x.peer}", f"{x.faster:.2f}" if x.faster else "doesn't run", x.cause) for x in losses(records)]
    text = table(["target", "case", "measured", "kept"], kept) if kept else ""
    return text + ("\nWhere others are faster:\n\n" + table(["", "times as fast", "why"], lost) if lost else "")


def main(arguments: list[str]) -> int:
    """Draw the pictures and write the page."""
    argparse.ArgumentParser(prog="python -m benchmarks docs", description=__doc__).parse_args(arguments)
    PAGE.parent.mkdir(exist_ok=True)
    files = [Records.load(path) for path in sorted(RESULTS.glob("*.json"))]
    PAGE.write_text(page(files))
    draw_summary(files)
    fill(files)
    print(PAGE)
    return 0
