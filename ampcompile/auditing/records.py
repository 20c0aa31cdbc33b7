"""Plain records of an audit: ops, modules, gradients. They hold no tensor."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .numbers import Numbers, combine


@dataclass(frozen=True)
class Place:
    """The place of an op."""

    op: str
    """Name of the op, as `aten.mm`; casts are `aten._to_copy`."""
    module: str
    """Path of the module that calls the op, or whose op it differentiates; empty outside of modules."""
    source: str
    """The user's line, `file:line`."""
    backward: bool
    """True if the op computes gradients."""

    @property
    def name(self) -> str:
        """The op, and that it computes gradients if it does."""
        return f"{self.op} (backward)" if self.backward else self.op

    def __str__(self) -> str:
        return f"{self.name} in {self.module or 'no module'}, {os.path.basename(self.source) or 'unknown line'}"


@dataclass(frozen=True)
class OpNumbers(Place):
    """One op of the mixed run, in the order in which they ran."""

    dtype: torch.dtype
    """The dtype of its first floating result."""
    numbers: Numbers


@dataclass(frozen=True)
class ModuleNumbers:
    """All ops that one module calls itself, forward and backward: the worst errors, shares of all elements."""

    module: str
    ops: int
    numbers: Numbers


def group_by_module(ops: Iterable[OpNumbers]) -> list[ModuleNumbers]:
    """Combine the ops of each module; modules are in the order in which they ran first."""
    groups: dict[str, list[Numbers]] = {}
    for op in ops:
        groups.setdefault(op.module, []).append(op.numbers)
    return [ModuleNumbers(module, len(parts), combine(parts)) for module, parts in groups.items()]
