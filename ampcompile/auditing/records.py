"""Plain records of an audit: ops, modules, gradients. They hold no tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .numbers import Numbers, combine


@dataclass(frozen=True)
class Place:
    """The place of an op: its name as `aten.mm`, the path of the module that calls it, the user's line."""

    op: str
    module: str
    source: str
    backward: bool
    """True if the op computes gradients."""


@dataclass(frozen=True)
class OpNumbers:
    """One op of the mixed run, in the order in which they ran."""

    place: Place
    dtype: torch.dtype
    """The dtype of its first floating result."""
    numbers: Numbers

    @property
    def op(self) -> str:
        """Name of the op, as `aten.mm`; casts are `aten._to_copy`."""
        return self.place.op

    @property
    def module(self) -> str:
        """Path of the module that calls the op, or whose op it differentiates; empty outside of modules."""
        return self.place.module

    @property
    def source(self) -> str:
        """The user's line, `file:line`."""
        return self.place.source

    @property
    def backward(self) -> bool:
        """True if the op computes gradients."""
        return self.place.backward


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
