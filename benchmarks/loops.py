"""A compiled training step loop by loop: each beside the time that its bytes take at the rate of a copy (CPU)."""

import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any
from unittest import mock

import torch
from torch._inductor.codegen.cpp import CppScheduling
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.architectures import build
from benchmarks.counting import PRODUCTS, nothing_from_caches
from benchmarks.kernel_cases import Kernel, limits
from benchmarks.paper.traffic import traffic
from benchmarks.peers import AMP, PEERS
from benchmarks.records import Row, spread
from benchmarks.steps import TrainingStep
from benchmarks.works import CLIPPED, Work

ROUNDS = 7
LEAST = 1e-3
"""Seconds of a step that something takes to have a row of its own."""
EMULATED = 1.0
"""Seconds that a product takes, at least, where a CPU emulates its type."""
STEP, MATRICES, REST = "the whole step", "products of matrices", "what takes less than 1 ms, together"
LOOP = re.compile(r"graph_\d+_(cpp_\w*?)_*$")


def measure(work: Work) -> list[Row]:
    """Rows of the step, timed without a profiler, of its products, and of each loop and call of a millisecond or more.

    A bound is the bytes that a loop moves at the rate of a copy; of products, their operations at the rate of the
    faster type's product of 2048 x 2048.
    """
    model, inputs = build(work.model, work.batch, work.length, True)
    with FlopCounterMode(display=False) as flops:
        model(*inputs).backward()
    model.zero_grad()
    run = PEERS[AMP].compiled(model, torch.bfloat16)
    step = TrainingStep(model, run, inputs, partial(PEERS[AMP].around, "cpu", torch.bfloat16), CLIPPED, True)
    with torch._inductor.config.patch("cpp.enable_kernel_profile", True), bytes_of_loops() as moved:
        with nothing_from_caches():
            step()
        for _ in range(3):
            step()
        faults, whole = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, [_seconds(step) for _ in range(ROUNDS)]
        faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) // ROUNDS
    parts, calls = _profiled(step)
    copy, *products = limits("cpu")
    bandwidth = copy.bytes * _rate(copy)
    bounds = {name: size * calls[name] / bandwidth for name, size in moved.items() if name in calls}
    bounds[MATRICES] = flops.get_total_flops() / max(kernel.flops * _rate(kernel) for kernel in products)
    rows = [Row(STEP, AMP, {"seconds": whole, "calls": 1, "page_faults": faults})]
    for name, seconds in sorted(parts.items(), key=lambda part: -sum(part[1])):
        bound = {"bound_seconds": [bounds[name]] * ROUNDS} if name in bounds else {}
        rows.append(Row(name, AMP, {"seconds": seconds, "calls": calls[name], **bound}))
    return rows


@contextmanager
def bytes_of_loops() -> Iterator[dict[str, int]]:
    """The bytes that each loop moves which Inductor writes meanwhile, by the name in its record."""
    define, moved = CppScheduling.define_kernel, dict[str, int]()

    def counting(self: Any, code: str, nodes: Any, *args: Any) -> str:
        name = define(self, code, nodes, *args)
        moved[name] = sum(map(traffic, nodes))
        return name

    with mock.patch.object(CppScheduling, "define_kernel", counting):
        yield moved


def _profiled(step: Callable[[], object]) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds in each of `ROUNDS` steps, and calls a step, of what takes long, of products and of the rest."""
    rounds: list[dict[str, float]] = []
    calls: dict[str, int] = {}
    for _ in range(ROUNDS):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            step()
        rounds.append({})
        calls.clear()
        for event in profiled.key_averages():
            name = _name(event.key)
            rounds[-1][name] = rounds[-1].get(name, 0.0) + event.self_cpu_time_total / 1e6
            calls[name] = calls.get(name, 0) + event.count
    long = {name for name in calls if spread([each.get(name, 0.0) for each in rounds]).middle >= LEAST}
    parts = {name: [each.get(name, 0.0) for each in rounds] for name in long}
    parts[REST] = [sum(seconds for name, seconds in each.items() if name not in long) for each in rounds]
    return parts, {**calls, REST: sum(count for name, count in calls.items() if name not in long)}


def _name(record: str) -> str:
    if found := LOOP.match(record):
        return found[1]
    return MATRICES if PRODUCTS.search(record) else record


def _seconds(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def _rate(kernel: Kernel) -> float:
    """Calls a second; of a product that this CPU emulates, one call tells."""
    call = kernel.candidates["torch"]
    first = _seconds(call)
    return 1 / (first if first > EMULATED else spread([_seconds(call) for _ in range(ROUNDS)]).middle)
