"""One watched graph: the input that asks for its statistics, and the rings that keep them."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ampcompile.compiler.module_names import modules_of
from ampcompile.passes.after.record_magnitudes import WatchedValue
from ampcompile.passes.graph import placeholders
from ampcompile.passes.watch_op import SLOTS, STATISTICS, WATCHED
from ampcompile.torch_private import tracing

from .ring import Ring

graphs: weakref.WeakSet[WatchedGraph] = weakref.WeakSet()
_clocks: dict[torch.device, Tensor] = {}


class WatchedGraph:
    """Keeps the statistics that a graph computes. `values` says of what; `of` is the callable that was compiled."""

    def __init__(self, device: torch.device, of: Any) -> None:
        self.values: list[WatchedValue] = []
        self.rings: dict[bool, Ring] = {}  # by direction: True for backward
        self._owners = [weakref.ref(owner) for owner in _owners(of)]
        self.slots = torch.zeros(STATISTICS, SLOTS, device=device)
        """The input; its gradient is the statistics of backward."""
        if torch.is_grad_enabled():
            self.slots.requires_grad_().register_post_accumulate_grad_hook(partial(_take, weakref.ref(self)))
        graphs.add(self)

    def belongs_to(self, f: Any) -> bool:
        """True if the graph is one of `f`, or of a method of the same module."""
        owners = _owners(f)
        return any(owner() is each for owner in self._owners for each in owners)

    def attach(self, gm: GraphModule) -> None:
        """Add the input and the output of the statistics to a captured graph, behind all others."""
        graph, mode = gm.graph, tracing.fake_mode_of(gm)
        with graph.inserting_after(placeholders(gm)[-1]):
            slots = graph.placeholder("amp_watched")
        slots._dynamo_source = None  # type: ignore[attr-defined]
        slots.meta["val"] = self.slots.detach() if mode is None else mode.from_tensor(self.slots.detach())
        output = graph.output_node()
        with graph.inserting_before(output):
            statistics = graph.call_function(WATCHED, (slots, False))
        statistics.meta["val"] = slots.meta["val"]
        output.args = ((*output.args[0], statistics),)
        gm.recompile()

    def record(self, statistics: Tensor, backward: bool = False) -> None:
        """Keep the statistics of a call, without waiting for the device."""
        statistics = statistics.detach()
        if statistics.device not in _clocks:
            _clocks[statistics.device] = torch.zeros(1, dtype=torch.int64, device=statistics.device)
        if backward not in self.rings:
            self.rings[backward] = Ring(statistics)
        self.rings[backward].write(statistics, _clocks[statistics.device])


def _owners(f: Any) -> list[Any]:
    function = getattr(f, "__func__", f)
    return [*modules_of(f)] or [function]


@torch.compiler.disable
def _take(graph: weakref.ref[WatchedGraph], slots: Tensor) -> None:
    statistics, slots.grad, watched = slots.grad, None, graph()
    if statistics is not None and watched is not None:
        watched.record(statistics, backward=True)
