"""A call as torch's profiler sees it: the names of what ran, and a GPU's time, launches and idle time."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity

ANNOTATIONS = ("ProfilerStep", "Optimizer.", "amp: ", "## Call", "Torch-Compiled")
"""How the names of spans begin that stand on the GPU's line beside the kernels in them, and would count twice."""


@contextmanager
def profiled(*activities: ProfilerActivity) -> Iterator[list[str]]:
    """Collect the names of what runs meanwhile; without what the profiler prints."""
    names: list[str] = []
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            yield names
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    names += [event.name for event in profile.events()]


def profile_gpu(call: Callable[[], object], calls: int = 3) -> dict[str, float]:
    """Seconds that the kernels of a call take on the GPU, how many there are, and seconds idle between them."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    ran = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(e.time_range.start, e.time_range.end) for e in ran if not e.name.startswith(ANNOTATIONS)]
    busy, idle = sum_spans(spans)
    return {"gpu_seconds": busy / calls / 1e6, "idle_seconds": idle / calls / 1e6, "launches": len(spans) / calls}


def sum_spans(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """How long all spans are together, and how long nothing ran between the first and the last."""
    busy = idle = 0.0
    until: float | None = None
    for start, end in sorted(spans):
        busy += end - start
        idle += max(0.0, start - until) if until is not None else 0.0
        until = end if until is None else max(until, end)
    return busy, idle
