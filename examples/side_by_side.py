"""The same training run in every way: each in a process of its own, one step of each in turn."""

import ctypes
import gc
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

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
        """Median over the steps, so the first, which compiles, doesn't count."""
        return median(self.seconds)


def race(entrants: list[Entrant], device: str, steps: int) -> Iterator[float]:
    """Round by round, one step of each entrant, noted there; gives the last entrant's losses."""
    context = multiprocessing.get_context("spawn")
    lines, processes = [], []
    for entrant in entrants:
        here, there = context.Pipe()
        lines.append(here)
        processes.append(context.Process(target=run, args=(entrant.way, device, steps, there), daemon=True))
        processes[-1].start()
        there.close()  # so that a process that died is noticed, not waited for
    for _ in range(steps):
        for entrant, line in zip(entrants, lines, strict=True):
            line.send("step")
            try:
                seconds, loss, entrant.peak_bytes = line.recv()
            except EOFError:
                raise RuntimeError(
                    f"the process of {entrant.way} ended before its last step; see its error above"
                ) from None
            entrant.seconds.append(seconds)
            entrant.losses.append(loss)
        yield loss
    for process in processes:
        process.join()


def run(way: str, device: str, steps: int, line: Connection) -> None:
    """Body of an entrant's process."""
    training = Training(way, device, steps)
    for step in range(steps):
        line.recv()
        start = perf_counter()
        loss = training.step()
        line.send((perf_counter() - start, loss, peak_bytes(device)))
        if step == 0:
            forget_peak(device)


def forget_peak(device: str) -> None:
    """Hand free memory back and start the peak anew, so that it is that of training, not of compilation."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: str) -> int:
    """Most memory held since `forget_peak`."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform != "linux":
        return 0
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["VmHWM"].removesuffix("kB"))
