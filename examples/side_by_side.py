"""The same training run in every way: each in a process of its own, one step of each in turn."""

from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.apart import apart
from benchmarks.memory import forget_peak, peak_bytes
from examples.gpt_training import Training


@dataclass
class Entrant:
    """What one way of running the model did, step by step."""

    way: str
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    """Most memory held after the first step: allocated on a CUDA device, else resident; 0 where unknown."""

    @property
    def step_seconds(self) -> float:
        """Median over the steps; the first, which compiles, doesn't count if there are others."""
        return median(self.seconds[1:] or self.seconds)


class Observed(Training):
    """A training that tells what each step took."""

    def observed_step(self) -> tuple[float, float, int]:
        """Seconds, loss, and most bytes held since the first step, whose memory is compilation's."""
        start = perf_counter()
        loss = self.step()
        seconds, peak = perf_counter() - start, peak_bytes(self.device)
        if self.steps_done == 1:
            forget_peak(self.device)
        return seconds, loss, peak


def race(entrants: list[Entrant], device: str, steps: int, caches: Path) -> Generator[float, None, None]:
    """Round by round, one step of each entrant, noted there; gives the last entrant's losses.

    What is compiled is looked for, and kept, in the folder `caches`. Raises FailedError.
    """
    with ExitStack() as open_processes:
        processes = [
            open_processes.enter_context(apart(Observed, entrant.way, device, steps, caches=caches))
            for entrant in entrants
        ]
        for _ in range(steps):
            for entrant, process in zip(entrants, processes, strict=True):
                seconds, loss, entrant.peak_bytes = process.ask("observed_step")
                entrant.seconds.append(seconds)
                entrant.losses.append(loss)
            try:
                yield loss
            except GeneratorExit:  # enough rounds: the processes end by themselves
                return
