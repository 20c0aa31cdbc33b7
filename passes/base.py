"""What a pass is, and the runner that does everything around it: lint, verify, time, log, recompile, errors."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from ampcompile.errors import AmpError, PassError

from .graph import graphs
from .verify import verify

log = logging.getLogger("ampcompile")
VERIFY = os.environ.get("AMPCOMPILE_VERIFY") == "1"  # between every two passes; the tests switch it on


class Pass(Protocol):
    """A frozen value with options as fields, before or after differentiation. It leaves all ceremony to `run_passes`.

    `exact`: no digit of any result changes. `fate`: what `explain` says of a cast of ours that is gone after the
    pass; empty if the pass takes none away.
    """

    @property
    def name(self) -> str: ...
    @property
    def exact(self) -> bool: ...
    @property
    def fate(self) -> str: ...
    def apply(self, gm: GraphModule) -> int:
        """Rewrite the graph, and the bodies that it calls, in place; returns the number of rewrites."""


@dataclass(frozen=True)
class Applied:
    """One entry of a graph's history: what ran, how many rewrites, how long it took (seconds)."""

    name: str
    rewrites: int
    seconds: float


Watch = Callable[[Pass | None, GraphModule], None]
"""Sees a graph after each pass; None stands for AOTAutograd, which wrote the graph before the first pass."""


def run_passes(passes: Sequence[Pass], gm: GraphModule, watch: Watch | None = None) -> list[Applied]:
    """Run the passes in order. Raises PassError, naming the pass and those before it, if one fails.

    Around each pass the graph and its bodies are checked, compiled anew and timed, and `watch(pass, gm)` is called.
    """
    history: list[Applied] = []
    known: dict[Any, torch.dtype] = {}  # to the verifier
    for current in passes:
        start = time.perf_counter()
        try:
            rewrites = current.apply(gm)
            for graph in graphs(gm):
                graph.graph.lint()
                graph.recompile()
            if VERIFY:
                verify(gm, known)
        except AmpError:
            raise
        except Exception as error:
            before = ", ".join(f"{done.name} ({done.rewrites})" for done in history) or "none"
            raise PassError(
                f"pass {current.name} failed: {type(error).__name__}: {error}. Passes before it: {before}. This is a "
                f"fault of ampcompile or of torch {torch.__version__}; torch.compile(..., backend='inductor') under "
                "torch.autocast runs the same model meanwhile."
            ) from error
        history.append(Applied(current.name, rewrites, time.perf_counter() - start))
        if watch is not None:
            watch(current, gm)
        log.debug("%s: %d rewrites, %.1f ms", current.name, rewrites, 1e3 * history[-1].seconds)
    return history
