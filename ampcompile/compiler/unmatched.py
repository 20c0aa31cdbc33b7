"""Warn, once, of policy patterns that matched nothing in the first call of what was compiled with them."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from ampcompile.errors import AmpWarning
from ampcompile.passes.graph import graphs, module_path
from ampcompile.policy import Policy
from ampcompile.torch_private.types import OpOverload

from .call_state import current_call
from .module_names import module_names


@dataclass
class CompiledNames:
    """Names of the ops, and paths of the modules, of the graphs compiled in a call."""

    ops: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)

    def add(self, gm: GraphModule) -> None:
        """Remember a captured graph and its bodies."""
        for node in (node for graph in graphs(gm) for node in graph.graph.nodes):
            if isinstance(node.target, OpOverload):
                self.ops.add(node.target.name())
                self.modules.add(module_path(node))


def warn_after_first_call(compiled: Callable[..., Any], fn: Any, policy: Policy) -> Callable[..., Any]:
    """`compiled`, made from `fn`, whose first call is followed by a look at what `policy` has matched."""
    waiting = True

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal waiting
        if not waiting:
            return compiled(*args, **kwargs)
        current_call.graphs, outer = CompiledNames(), current_call.graphs
        try:
            result = compiled(*args, **kwargs)
            seen = current_call.graphs
        finally:
            current_call.graphs = outer
        waiting = not seen.ops  # nothing was compiled: Dynamo had it already, or ran it eagerly
        if not waiting:
            warn(policy, seen, fn)
        return result

    return call


def warn(policy: Policy, seen: CompiledNames, fn: Any) -> None:
    """Of each pattern that matched nothing in what was seen of `fn`, at the line of the user's that called."""
    for glob, near in policy.unmatched(seen.ops, seen.modules | set(module_names(fn).values())).items():
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        kind = "op" if glob in dict(policy.ops) else "module"
        warnings.warn(
            f"policy pattern {glob!r} matches no {kind} of the first call.{hint} ampcompile.explain lists the names of "
            "ops and modules.",
            AmpWarning,
            stacklevel=outside(),
        )


_INSIDE = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], torch.__path__[0]))


def is_inside(filename: str) -> bool:
    """Whether a file is ours or torch's."""
    return filename.startswith(_INSIDE)


def outside() -> int:
    """How many calls above its own caller, that included, the first code stands that is neither ours nor torch's."""
    level, frame = 1, sys._getframe(1)
    while is_inside(frame.f_code.co_filename) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level
