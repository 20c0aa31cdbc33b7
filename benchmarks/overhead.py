"""What a call costs the host beside the graph's code: amp's call less stock's, and in it the look at weights.

On each device that is there, in turn in one process. The graph's code runs once: then its result is returned again.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from ampcompile.compiler.backend import amp
from ampcompile.weights import Binding, CopySpec, Form
from benchmarks.architectures import TinyLinears
from benchmarks.records import Records

COUNTS = (20, 148)
"""Of weights"""
CALLS = 20
"""In a row; the least of all rounds counts, as others use the machine too."""
Call = Callable[[], object]


class Once:
    """Compiled code that runs once. Afterwards a call returns what that did."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled, self.result = compiled, None

    def __call__(self, *args: Any) -> Any:
        if self.result is None:
            self.result = self.compiled(*args)
        return self.result


def make_call(device: str, count: int, ours: bool) -> Call:
    """A call of a model of so many weights, as amp makes it, or as stock torch.compile does, given the copies."""

    def compile_graph(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graph: Any = amp(gm, inputs, options={"dtype": torch.bfloat16, "lower": "aot_eager", "outputs": "autocast"})
        graph._compiled = Once(graph._compiled)
        held: list[Any] = []

        def call(*args: Any) -> Any:
            if not held:
                held[:] = graph._copies(args)
            return graph._compiled(*args, *held)

        return graph if ours else call

    model, x = TinyLinears(count).to(device), torch.ones(1, 16, device=device)
    run = torch.compile(model, backend=compile_graph)

    def infer() -> None:
        with torch.no_grad():
            run(x)

    return infer


def make_look(device: str, count: int) -> Call:
    """The look at so many weights: whether their copies are fresh."""
    weights: tuple[Tensor, ...] = tuple(nn.Parameter(torch.randn(16, 16, device=device)) for _ in range(count))
    binding = Binding([CopySpec(i, Form(torch.bfloat16)) for i in range(count)])
    return lambda: binding.copies(weights)


def least(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """The least seconds of each call, taken in turn."""
    found = dict.fromkeys(calls, float("inf"))
    for turn in range(-1, rounds):
        for name, call in calls.items():
            begin = perf_counter()
            for _ in range(CALLS):
                call()
            if turn >= 0:
                found[name] = min(found[name], (perf_counter() - begin) / CALLS)
    return found


def measure(records: Records, devices: Sequence[str], rounds: int = 100, counts: Sequence[int] = COUNTS) -> None:
    """Note for each device and number of weights what amp's call takes beside stock's, and the look."""
    for count in counts:
        looks = least({device: make_look(device, count) for device in devices}, rounds)
        calls = {f"{device}{ours}": make_call(device, count, ours) for device in devices for ours in (True, False)}
        taken = least(calls, rounds)
        for device in devices:
            over = taken[f"{device}True"] - taken[f"{device}False"]
            records.add(f"beside the graph's code, a call with {count} weights", device, seconds=[over])
            records.add(f"the look at {count} weights", device, seconds=[looks[device]])
