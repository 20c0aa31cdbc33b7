"""An audit as text that fits a terminal: the whole run, the first overflow, modules, the worst ops."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from ampcompile.dtypes import short_name
from ampcompile.explaining.text import table_of, text_of

from .numbers import Numbers
from .records import ModuleNumbers, OpNumbers, Place

if TYPE_CHECKING:
    from .result import Audit

MODULES, OPS = 40, 10
"""How many rows the tables have at most."""
NUMBERS = ("alone", "from start", "largest", "overflow", "to zero")
"""Headings of the columns that show a row's `Numbers`."""


def render(audit: Audit, width: int | None = None) -> str:
    """The tables, at most `width` columns wide (default: the terminal's)."""
    parts: list[str | Table] = [*_headlines(audit), "", _module_table(audit.modules), "", _op_table(audit.ops)]
    if audit.unmeasured:
        parts.append(f"not run in high precision: {', '.join(audit.unmeasured)}")
    return text_of(parts, width)


def _headlines(audit: Audit) -> list[str]:
    lines = [f"mixed run against {short_name(audit.against)}: {len(audit.ops)} ops"]
    if audit.outputs:
        lines.append(f"relative error of the outputs: {', '.join(map(_error, audit.outputs))}")
    if audit.gradient_error is not None:
        lines.append(f"relative error of all gradients together: {_error(audit.gradient_error)}")
    lines.append(f"first overflow: {_where(audit.first_overflow)}")
    lines.append(f"first flush to zero: {_where(audit.first_underflow)}")
    return lines


def _where(place: Place | None) -> str:
    if place is None:
        return "none"
    backward = " (backward)" if place.backward else ""
    return f"{place.op}{backward} in {place.module or 'no module'}, {os.path.basename(place.source) or 'unknown line'}"


def _module_table(modules: Sequence[ModuleNumbers]) -> Table:
    shown = sorted(modules, key=lambda m: _badness(m.numbers), reverse=True)[:MODULES]
    title = "module" if len(shown) == len(modules) else f"module (the worst {len(shown)} of {len(modules)})"
    table = table_of([title], ["ops", *NUMBERS])
    for module in modules:
        if module in shown:
            table.add_row(module.module or "(none)", str(module.ops), *_cells(module.numbers))
    return table


def _op_table(ops: Sequence[OpNumbers]) -> Table:
    table = table_of(["op, the worst first", "module", "line", "dtype"], NUMBERS)
    for op in sorted(ops, key=lambda op: _badness(op.numbers), reverse=True)[:OPS]:
        name = f"{op.op} (backward)" if op.backward else op.op
        row = (name, op.module or "(none)", os.path.basename(op.source), short_name(op.dtype))
        table.add_row(*row, *_cells(op.numbers))
    return table


def _badness(numbers: Numbers) -> tuple[bool, float, float]:
    return numbers.overflowed > 0, numbers.flushed, numbers.local or 0.0


def _cells(numbers: Numbers) -> tuple[str, ...]:
    return (
        _error(numbers.local),
        _error(numbers.cumulative),
        f"{numbers.largest:.1e}",
        _share(numbers.overflowed),
        _share(numbers.flushed),
    )


def _error(value: float | None) -> str:
    return "" if value is None else "infinite" if math.isinf(value) else f"{value:.1e}"


def _share(value: float) -> str:
    return "" if not value else f"{value:.1%}" if value >= 0.001 else "<0.1%"
