"""What a pass is, and the runner that does everything around it: lint, verify, time, log, recompile, errors."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.fx import GraphModule

from ampcompile.errors import AmpError, PassError

from .verify import verify

log = logging.getLogger("ampcompile")
VERIFY = os.environ.get("AMPCOMPILE_VERIFY") == "1"  # between every two passes; the tests switch it on


class Pass(Protocol):
    """A frozen value with options as fields. `exact`: no digit of any result changes."""

    @property
    def name(self) -> str: ...
    @property
    def exact(self) -> bool: ...
    def apply(self, gm: GraphModule) -> int:
        """Rewrite the graph in place; returns the number of rewrites."""


@dataclass(frozen=True)
class Applied:
    """One entry of a graph's history: what ran, how many rewrites, how long it took (seconds)."""

    name: str
    rewrites: int
    seconds: float


Watch = Callable[[str, GraphModule], None]


def run_passes(passes: Sequence[Pass], gm: GraphModule, watch: Watch | None = None) -> list[Applied]:
    """Run the passes in order. Raises PassError, naming the pass and those before it, if one fails.

    `watch(name, gm)` is called after each pass.
    """
    history: list[Applied] = []
    for current in passes:
        start = time.perf_counter()
        try:
            rewrites = current.apply(gm)
            gm.graph.lint()
            gm.recompile()
            if VERIFY and not getattr(current, "only_decides", False):
                verify(gm)
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
            watch(current.name, gm)
        log.debug("%s: %d rewrites, %.1f ms", current.name, rewrites, 1e3 * history[-1].seconds)
    return history
