"""How much of a cold compile is ours, and how that grows with the graph.

python -m benchmarks.compile_time [--device cpu] [--deep]

`--deep` compiles a graph of 10,000 nodes too, by which Inductor is busy for many minutes.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, replace
from time import perf_counter
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule

from ampcompile.compiler import backend, lower
from ampcompile.config import Options
from benchmarks.models import GPT, GPTConfig

TWELVE_LAYERS = GPTConfig(layers=12, width=384, heads=6, vocab=2048, context=128)

ONE_LAYER = GPTConfig(layers=1, width=16, heads=2, vocab=32, context=8)

TEN_THOUSAND_NODES = replace(ONE_LAYER, layers=212)


@dataclass(frozen=True)
class Compile:
    """One cold compile, forward and backward, seconds."""

    backend: str
    total: float
    ours: float


@dataclass(frozen=True)
class Growth:
    """Our passes on one Dynamo graph of `nodes` nodes, seconds."""

    nodes: int
    seconds: float


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


def cold_compile(name: str, device: str, config: GPTConfig = TWELVE_LAYERS) -> Compile:
    """First forward and backward of a fresh model with empty caches, less the time of a second one."""
    torch._dynamo.reset()
    model = GPT(config).to(device)
    tokens, targets = torch.randint(config.vocab, (2, 2, config.context), device=device)
    run = torch.compile(model, backend=name)
    by_hand = torch.autocast(device, torch.bfloat16, enabled=name == "inductor")

    def step() -> float:
        start = perf_counter()
        with by_hand:
            loss = run(tokens, targets)
        loss.backward()
        loss.item()
        return perf_counter() - start

    with tempfile.TemporaryDirectory() as empty, mock.patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=empty):
        with our_seconds() as ours:
            first = step()
        return Compile(name, first - step(), sum(ours))


def growth(depths: Sequence[int] = (16, 32, 64, 128, 256), repeats: int = 3) -> list[Growth]:
    """Best time of our passes on the graphs of deeper and deeper GPTs; the narrowest, since only nodes count."""
    found: list[Growth] = []

    def measure(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
        times = []
        for _ in range(repeats):
            start = perf_counter()
            rewritten = backend.rewrite(gm, inputs, Options())
            times.append(perf_counter() - start)
        found.append(Growth(len(rewritten.graph.graph.nodes), min(times)))
        return gm

    for depth in depths:
        torch._dynamo.reset()
        config = replace(ONE_LAYER, layers=depth)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            torch.compile(GPT(config), backend=measure)(*torch.zeros(2, 1, config.context, dtype=torch.int64))
    return found


def exponent(points: Sequence[Growth]) -> float:
    """Slope of log(seconds) over log(nodes), by least squares: 1 is linear."""
    nodes, seconds = (torch.tensor(axis, dtype=torch.float64).log() for axis in zip(*map(astuple, points), strict=True))
    nodes, seconds = nodes - nodes.mean(), seconds - seconds.mean()
    return float((nodes * seconds).sum() / nodes.square().sum())


def main(device: str, deep: bool) -> None:
    """Prints both measurements."""
    cold_compile("amp", device, ONE_LAYER)  # so that imports and probes of the processor are nobody's
    for config in (TWELVE_LAYERS, *([TEN_THOUSAND_NODES] if deep else [])):
        for name in ("inductor", "amp"):
            compiled = cold_compile(name, device, config)
            share = 100 * compiled.ours / compiled.total
            print(
                f"{config.layers} layers, {name}: cold compile {compiled.total:.1f} s, our passes {share:.1f} % of it",
                flush=True,
            )
    points = growth()
    for point in points:
        print(f"{point.nodes} nodes: {point.seconds:.2f} s, {1e6 * point.seconds / point.nodes:.0f} µs a node")
    print(f"seconds grow as nodes to the power of {exponent(points):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--deep", action="store_true")
    options = parser.parse_args()
    main(options.device, options.deep)
