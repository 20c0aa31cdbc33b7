"""What a scaler's step costs the host: python -m benchmarks.host_time [--steps N]

Clip, step and update for the 148 parameters of a GPT of 124 M as on a GPU, but nothing is launched and tensors, small
ones, lie on the CPU. Triton's own work at a launch isn't part of it.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from ampcompile.kernels import native, step
from ampcompile.kernels.check_grads import Checked
from ampcompile.scaler import fused, grad_scaler
from ampcompile.weights import copies
from ampcompile.weights.binding import bind
from ampcompile.weights.sample import SampledAddresses
from benchmarks.models import GPT, GPT_124M
from benchmarks.records import Row

MOST = 0.3e-3
"""Seconds that clip, step and update may take together, with nothing moved."""
SHRUNK = 64


class NoLaunch:
    """A kernel that isn't launched."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


@contextmanager
def launching_nothing() -> Iterator[None]:
    """The scaler takes the GPU's path, up to each launch, on CPU tensors."""
    from ampcompile.kernels.triton import adam, check_grads, update_scale
    from ampcompile.kernels.triton import step as launches

    def take(tensors: Any, multiplier: Any, found_inf: Any, workspace: dict[str, Any]) -> None:
        lrs, settings = [group.lr for group in tensors.groups], native.group_values(tensors.groups)
        adam.step_(step.table_of(tensors, workspace), settings, lrs, multiplier, found_inf, workspace)

    replaced = [
        (adam, "amp_adam_prepare", NoLaunch()),
        (adam, "amp_adam", NoLaunch()),
        (check_grads, "amp_check_grads", NoLaunch()),
        (update_scale, "amp_update_scale", NoLaunch()),
        (launches.tables, "CHUNK", launches.tables.CHUNK // SHRUNK**2),
        (copies, "places", lambda weight: SampledAddresses(np.empty(0, np.int64), np.empty(0, np.int64))),
        (fused, "adam_", take),
        (fused, "check_grads", lambda *given: Checked(*check_grads.check_grads(*given))),
        (grad_scaler, "update_scale_", update_scale.update_scale_),
    ]
    with ExitStack() as stack:
        for module, name, value in replaced:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def measure(steps: int = 300) -> list[Row]:
    """Seconds of each part of each step; with copies of the matrices, as a compiled graph has them, and without.

    Raises RuntimeError if a step didn't write the copies: its time would be another.
    """
    rows = []
    with torch.device("meta"):
        shapes = [param.shape for param in GPT(GPT_124M).parameters()]
    for copied in (False, True):
        params = [nn.Parameter(torch.randn([max(1, size // SHRUNK) for size in shape])) for shape in shapes]
        for param in params:
            param.grad = torch.randn_like(param)
        matrices = [param for param in params if copied and param.dim() > 1]
        binding = bind([torch.bfloat16] * len(matrices))
        with launching_nothing():
            binding.copies(matrices)
            casts = copies.cast_passes()
            times = _times(params, steps)
            binding.copies(matrices)
        if copies.cast_passes() != casts:
            raise RuntimeError("found copies that had to be cast again, expected each step to have written them all")
        case = f"{len(params)} parameters, {len(matrices)} copies"
        rows += [Row(f"{case}: {part}", "amp", {"seconds": seconds, "most": MOST}) for part, seconds in times.items()]
    return rows


def _times(params: list[nn.Parameter], steps: int) -> dict[str, list[float]]:
    optimizer, scaler = torch.optim.AdamW(params), grad_scaler.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    parts: dict[str, Callable[[], object]] = {
        "clip": lambda: scaler.clip_grad_norm_(optimizer, 1.0),
        "step": lambda: scaler.step(optimizer),
        "update": scaler.update,
    }
    times: dict[str, list[float]] = {part: [] for part in (*parts, "all")}
    for turn in range(-5, steps):
        before = [perf_counter()]
        for call in parts.values():
            call()
            before.append(perf_counter())
        if turn >= 0:
            spans = [end - begin for begin, end in pairwise(before)]
            for part, seconds in zip(times, [*spans, sum(spans)], strict=True):
                times[part].append(seconds)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    for row in measure(parser.parse_args().steps):
        seconds = row.figures["seconds"]
        print(f"{row.case:40s} least {1e3 * min(seconds):.3f} ms, median {1e3 * median(seconds):.3f} ms")


if __name__ == "__main__":
    main()
