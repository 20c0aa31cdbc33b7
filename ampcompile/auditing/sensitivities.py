"""Predict what each module's roundings add to the results of a run, and what is left with some in float32."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

from ampcompile.explaining.text import table_of, text_of

from .adjoints import Rounding

ROWS = 30
"""Most rows that are printed."""


@dataclass(frozen=True)
class Sensitivity:
    """The error that the roundings of one kind of op in one module add to the results of the run."""

    module: str
    """Path of the module that calls the ops; empty outside of modules."""
    op: str
    """As `aten.mm`; casts are `aten._to_copy`. Forward and backward together."""
    error: float
    """Predicted root mean square of the relative error that they add to the result they harm most."""
    result: str
    """That result: `output 0`, or `gradients` for all of them together."""
    share: float
    """Of the squared error that all roundings add to that result."""
    keep: str = ""
    """Policy that computes these ops in float32, and no other kind in the module, as `op softmax@blocks.3=fp32`.

    It is also about ops of that name in modules inside it. Empty for casts, which go with the ops that read them, for
    backward, and for what is in float32 anyway.
    """


@dataclass(frozen=True)
class Sensitivities:
    """Predicted errors by module and kind of op, the largest first. `str` is a table that fits the terminal."""

    roundings: Sequence[Rounding]
    unfollowed: Sequence[str] = ()
    """Ops without a derivative: what is computed before them seems to add nothing."""

    @property
    def rows(self) -> list[Sensitivity]:
        """A row for each kind of op in each module, without those that add nothing."""
        groups: dict[tuple[str, str], list[Rounding]] = defaultdict(list)
        for rounding in self.roundings:
            groups[rounding.place.module, rounding.place.op].append(rounding)
        total = add_up(self.roundings)
        rows = []
        for (module, op), group in groups.items():
            added = add_up(group)
            if any(added.values()):
                result = max(added, key=lambda name: _sortable(added[name]))
                share = added[result] / total[result] if math.isfinite(total[result]) else math.nan
                called = sorted({rounding.called for rounding in group if rounding.low} - {""})
                keep = ", ".join(f"op {name}@{module}=fp32" for name in called)
                rows.append(Sensitivity(module, op, math.sqrt(added[result]), result, share, keep))
        return sorted(rows, key=lambda row: _sortable(row.error), reverse=True)

    @property
    def floor(self) -> float:
        """Predicted `error` with all modules in float32: what no choice of modules takes away."""
        return self.error({rounding.place.module for rounding in self.roundings})

    def by_module(self) -> dict[str, dict[str, float]]:
        """Squared errors that each module's roundings add to each result, over its squared norm."""
        groups: dict[str, list[Rounding]] = defaultdict(list)
        for rounding in self.roundings:
            groups[rounding.place.module].append(rounding)
        return {module: add_up(group) for module, group in groups.items()}

    def error(self, kept: Set[str] = frozenset()) -> float:
        """Predict `Audit.error` with these modules (paths of modules that call ops) in float32; NaN if it can't."""
        return worst(add_up(rounding for rounding in self.roundings if rounding.happens(kept)))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"rows": [asdict(row) for row in self.rows], "unfollowed": list(self.unfollowed)}

    def __str__(self) -> str:
        table = table_of(["module", "op", "of"], ["error", "share"])
        for row in self.rows[:ROWS]:
            share = "" if math.isnan(row.share) else f"{row.share:.1%}"
            table.add_row(row.module or "(none)", row.op, row.result, f"{row.error:.1e}", share)
        left = [f"{len(self.rows) - ROWS} more rows"] if len(self.rows) > ROWS else []
        unfollowed = [f"without a derivative: {', '.join(self.unfollowed)}"] if self.unfollowed else []
        return text_of([table, *left, *unfollowed])


def add_up(roundings: Iterable[Rounding]) -> dict[str, float]:
    """Squared errors by result: roundings are independent, so their squares add up."""
    sums: dict[str, float] = {}
    for rounding in roundings:
        for result, square in rounding.squares.items():
            sums[result] = sums.get(result, 0.0) + square
    return sums


def worst(squares: dict[str, float]) -> float:
    """Return the largest error; NaN if one is."""
    return math.sqrt(max(squares.values(), key=_sortable, default=0.0))


def _sortable(value: float) -> float:
    return math.inf if math.isnan(value) else value


def give_up_one_by_one(roundings: Sequence[Rounding], modules: Set[str]) -> Iterator[frozenset[str]]:
    """Yield sets of modules to keep in float32: all, then without the one that spares most for its error, and so on.

    A path stands for all inside it, so a module is kept only while all inside it are; the module "" is the whole. What
    a module costs is one, and its share of the 16-bit elements written.
    """
    harmful: dict[str, list[Rounding]] = {module: [] for module in modules}
    elements = dict.fromkeys(modules, 0)
    for rounding in roundings:
        for module in rounding.modules:
            harmful[module].append(rounding)
        if rounding.low:
            elements[rounding.place.module] += rounding.elements
    everything = sum(elements.values()) or 1
    cost = {module: 1 + elements[module] / everything for module in modules}
    error = {module: sum(map(_harm, harmful[module])) for module in modules}
    kept, happening = set(modules), set[int]()
    yield frozenset(kept)
    while kept:
        going = {module: [module, *(outer for outer in enclosing(module) if outer in kept)] for module in sorted(kept)}
        cheapest = min(going, key=lambda module: sum(map(error.__getitem__, going[module])) / cost[module])
        kept.difference_update(going[cheapest])
        new = [r for module in going[cheapest] for r in harmful[module] if id(r) not in happening]
        happening.update(map(id, new))
        for module in {other for rounding in new for other in rounding.modules}:
            error[module] = sum(_harm(r) for r in harmful[module] if id(r) not in happening)
        yield frozenset(kept)


def _harm(rounding: Rounding) -> float:
    return _sortable(max(rounding.squares.values(), key=_sortable, default=0.0))


def enclosing(module: str) -> list[str]:
    """Paths of the modules around a module, the outermost first: `""`, `a` and `a.b` for `a.b.c`."""
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(len(parts))] if module else []
