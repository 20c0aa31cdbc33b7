"""How much of a compile is ours, how that grows with the graph, and what our import takes."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule

from ampcompile.compiler import backend, lower
from ampcompile.config import Options
from benchmarks.models import GPT, GPTConfig
from benchmarks.peers import AMP
from benchmarks.records import Row

IMPORT = """
import time, torch
start = time.perf_counter()
import ampcompile
print(time.perf_counter() - start)
"""


@contextmanager
def our_seconds() -> Iterator[list[float]]:
    """Collects how long each call of the backend's own rewriting takes, before differentiation and after it."""
    seconds: list[float] = []

    def timed(function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds.append(perf_counter() - start)

        return call

    with ExitStack() as stack:
        for module, name in ((backend, "rewrite"), (lower, "_on_joint_graph")):
            stack.enter_context(mock.patch.object(module, name, timed(getattr(module, name))))
        yield seconds


def pass_growth(depths: Sequence[int], repeats: int = 3) -> list[Row]:
    """Best seconds of our passes on the graphs of deeper and deeper GPTs; the narrowest, since only nodes count."""
    rows: list[Row] = []

    def measure(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
        times = []
        for _ in range(repeats):
            start = perf_counter()
            rewritten = backend.rewrite(gm, inputs, Options.parse({}))
            times.append(perf_counter() - start)
        nodes = len(rewritten.graph.graph.nodes)
        rows.append(Row(f"{nodes} nodes", AMP, {"nodes": nodes, "seconds": [min(times)]}))
        return gm

    for depth in depths:
        torch._dynamo.reset()
        config = GPTConfig(layers=depth, width=16, heads=2, vocab=32, context=8)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            torch.compile(GPT(config), backend=measure)(*torch.zeros(2, 1, config.context, dtype=torch.int64))
    return rows


def import_time(rounds: int = 7) -> list[Row]:
    """Seconds of the import in new processes that have imported torch; the first, which fills caches, isn't counted."""
    command = [sys.executable, "-c", IMPORT]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(rounds + 1)]
    return [Row("import ampcompile, after torch", AMP, {"seconds": [float(run.stdout) for run in runs[1:]]})]
