"""A function's graph as the first pass meets it."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import GraphModule

from ampcompile.passes.capture.capture import capture
from ampcompile.passes.graph import UNDECIDED, Regions
from ampcompile.policy import Policy
from ampcompile.torch_private import tracing
from tests.compiling import LOW


def on(dtype: torch.dtype | None) -> Regions:
    """Autocast on the CPU with a dtype, or off."""
    return Regions({"cpu": (dtype is not None, dtype or LOW)})


def captured(f: Callable[..., Any], *args: torch.Tensor, dtype: torch.dtype | None = LOW) -> GraphModule:
    """The pre-dispatch graph of `f(*args)`, traced under autocast with `dtype`; None: without."""
    found: list[GraphModule] = []

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        fakes, mode = tracing.fake_inputs(example_inputs)
        found.append(capture(gm, fakes, mode, Policy()))
        return lambda *args: [torch.zeros(()) for _ in gm.graph.output_node().args[0]]  # nothing runs

    torch._dynamo.reset()
    with torch.autocast("cpu", dtype, cache_enabled=False) if dtype is not None else nullcontext():
        torch.compile(f, backend=backend, fullgraph=True)(*args)
    return found[0]


def settled(gm: GraphModule) -> GraphModule:
    """The same graph, whose values are now held against its ops."""
    gm.meta.pop(UNDECIDED)
    return gm
