"""Train a GPT on the Python standard library's source with `backend="amp"`, then beside what else there is.

python -m examples.train_gpt [--steps 300] [--rounds 30] [--device cpu]

Without --steps and --rounds the first steps are timed, and as many are taken as fit into three to four minutes.
"""

import argparse
import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from statistics import mean, median
from time import perf_counter

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import ampcompile
from examples.gpt_training import WAYS, Training, low_dtype
from examples.side_by_side import Entrant, race

CACHES = Path(__file__).parents[1] / ".inductor" / "demo" / torch.backends.cpu.get_cpu_capability()
"""What is compiled is kept here, so that the comparison finds what the long run has compiled. Stock Inductor's keys
don't tell vectors of one width from those of another, which ATEN_CPU_CAPABILITY chooses: wrong numbers, or a crash."""

LONG_RUN, COMPARISON = (80, 40, 300), (90, 2, 30)
"""Seconds to spend, and the fewest and the most steps to take: of amp alone, and of each way."""
TIMED = 5
"""Steps to time before the length of a run is chosen, the first of which compiles."""

console = Console(highlight=False, soft_wrap=True)


def shown(title: str, total: int, losses: Iterable[float]) -> Iterator[float]:
    """Passes losses on, with a bar that shows them; on a log, now and then a line."""
    if not console.is_terminal:
        for step, loss in enumerate(losses, start=1):
            if step % max(1, total // 10) == 0:
                console.print(f"{title}  {step}/{total}  loss {loss:.3f}")
            yield loss
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), console=console) as progress:
        task = progress.add_task(title, total=total, loss=float("nan"))
        for loss in losses:
            progress.update(task, advance=1, loss=loss)
            yield loss


def chosen(budget: tuple[float, int, int], seconds: float, what: str) -> int:
    """How many steps, of so many seconds each, are taken; says so."""
    available, fewest, most = budget
    steps = max(fewest, min(most, int(available / max(seconds, 1e-9))))
    console.print(f"{1000 * seconds:.0f} ms {what}: {steps} of them")
    return steps


def train(training: Training, steps: int | None) -> list[float]:
    """The losses of all steps; without a number of them, of as many as `LONG_RUN` has time for."""
    losses: list[float] = []
    if steps is None:
        seconds = []
        for _ in range(TIMED):
            start = perf_counter()
            losses.append(training.step())
            seconds.append(perf_counter() - start)
        steps = chosen(LONG_RUN, median(seconds[1:]), "a step")
    training.steps = steps
    rest = (training.step() for _ in range(len(losses), steps))
    return [*losses, *shown("amp", steps - len(losses), rest)]


def compare(entrants: list[Entrant], device: str, rounds: int | None) -> None:
    """Have each entrant take as many steps; without a number of them, as many as `COMPARISON` has time for."""
    race_of = race(entrants, device, rounds or COMPARISON[2], CACHES)
    with closing(race_of):
        if rounds is None:
            for _ in range(2):  # the first compiles
                next(race_of)
            rounds = chosen(COMPARISON, sum(entrant.seconds[-1] for entrant in entrants), "for a step of each way")
        done = len(entrants[0].losses)
        list(shown("four ways", rounds - done, islice(race_of, rounds - done)))


def show_casts(training: Training) -> None:
    """What the compiler decided, and the beginning of what it runs."""
    tokens, targets = training.batch(training.train_text)
    report = ampcompile.explain(training.run)(tokens, targets)
    console.rule("casts")
    console.print(str(report), markup=False)
    console.rule("the rewritten graph, up to its first products")
    body = report.code.partition("\n\n")[2] or report.code
    for line in body.splitlines()[:14]:
        console.print(line[:160] + ("…" if len(line) > 160 else ""), markup=False)


@torch.inference_mode()
def continued(training: Training, prompt: str, length: int) -> str:
    """The prompt and `length` bytes that the model writes after it."""
    context = training.model.config.context
    written = list(prompt.encode())
    window = torch.zeros(1, context, dtype=torch.int64, device=training.device)
    for _ in range(length):
        recent = written[-context:]
        window[0, : len(recent)] = torch.tensor(recent)  # one shape, so one graph: what follows is masked
        logits = training.run(window)[0, len(recent) - 1]
        written.append(int(torch.multinomial((logits.float() / 0.7).softmax(-1), 1)))
    return bytes(written).decode(errors="replace")


def comparison(entrants: list[Entrant]) -> Table:
    """The entrants' medians, last losses and peaks."""
    rounds = len(entrants[0].losses)
    memory = "allocated" if torch.cuda.is_available() else "resident"
    table = Table(title=f"{rounds} steps each, in turn")
    for heading in ("", "time per step (median)", f"loss after {rounds} steps", f"peak memory ({memory})"):
        table.add_column(heading, justify="right" if heading else "left")
    for entrant in entrants:
        peak = f"{entrant.peak_bytes / 2**20:.0f} MiB" if entrant.peak_bytes else "unknown"
        table.add_row(entrant.way, f"{1000 * entrant.step_seconds:.0f} ms", f"{entrant.losses[-1]:.4f}", peak)
    return table


def verdict(entrants: list[Entrant]) -> str:
    """The comparison in one sentence."""
    amp = next(entrant for entrant in entrants if entrant.way == "amp")
    others = sorted((entrant for entrant in entrants if entrant is not amp), key=lambda entrant: entrant.step_seconds)
    times = [f"{entrant.step_seconds / amp.step_seconds:.2f} times {entrant.way}'s" for entrant in others]
    first = others[0]
    if amp.step_seconds <= first.step_seconds:
        return f"A step of amp is the fastest here: its speed is {', '.join(times[:-1])} and {times[-1]}."
    return (
        f"A step of amp takes {amp.step_seconds / first.step_seconds:.2f} times as long as {first.way}'s, which is the "
        f"fastest here; its speed is {', '.join(times[:-1])} and {times[-1]}. `python -m ampcompile doctor` says what "
        "low precision gains on this machine."
    )


def main() -> None:
    """Explain, train, sample, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, help="length of the long run, which is amp alone")
    parser.add_argument("--rounds", type=int, help="steps of each way in the comparison")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    os.environ.update(TORCHINDUCTOR_CACHE_DIR=f"{CACHES}/inductor", AMPCOMPILE_CACHE_DIR=f"{CACHES}/ampcompile")
    training = Training("amp", options.device, options.steps or LONG_RUN[2])
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    console.print(
        f"a GPT of {parameters / 1e6:.1f} M parameters, {len(training.train_text) / 1e6:.1f} MB of source text, "
        f"{options.device}, {low_dtype(options.device)}, torch {torch.__version__}"
    )
    show_casts(training)

    console.rule("training")
    console.print("compiling: the first step takes a while")
    losses = train(training, options.steps)
    console.print(
        f"loss {losses[0]:.3f} -> {mean(losses[-20:]):.3f} (mean of the last 20), "
        f"on unseen files {training.validation_loss():.3f} nats a byte"
    )
    console.rule("what it writes")
    console.print(continued(training, "def ", 300), markup=False)

    console.rule("side by side")
    entrants = [Entrant(way) for way in WAYS]
    compare(entrants, options.device, options.rounds)
    console.print(comparison(entrants))
    console.print(verdict(entrants))


if __name__ == "__main__":
    main()
