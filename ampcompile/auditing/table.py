"""An audit as text that fits a terminal: the whole run, the first overflow, modules, the worst ops."""

from __future__ import annotations

import io
import math
import os
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ampcompile.dtypes import short_name

from .numbers import Numbers
from .records import ModuleNumbers, OpNumbers, Place

if TYPE_CHECKING:
    from .result import Audit

MODULES, OPS = 40, 10
"""How many rows the tables have at most."""


def render(audit: Audit, width: int | None = None) -> str:
    """The tables, at most `width` columns wide (default: the terminal's)."""
    console = Console(
        file=io.StringIO(),
        width=width or shutil.get_terminal_size((120, 24)).columns,
        highlight=False,
        color_system=None,
    )
    for line in _headlines(audit):
        console.print(line, markup=False)
    console.print()
    console.print(_module_table(audit.modules))
    console.print()
    console.print(_op_table(audit.ops))
    if audit.unmeasured:
        console.print(f"not run in high precision: {', '.join(audit.unmeasured)}", markup=False)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


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
    table = _table([title], ["ops"])
    for module in modules:
        if module in shown:
            table.add_row(module.module or "(none)", str(module.ops), *_cells(module.numbers))
    return table


def _op_table(ops: Sequence[OpNumbers]) -> Table:
    table = _table(["op, the worst first", "module", "line", "dtype"], [])
    for op in sorted(ops, key=lambda op: _badness(op.numbers), reverse=True)[:OPS]:
        name = f"{op.op} (backward)" if op.backward else op.op
        row = (name, op.module or "(none)", os.path.basename(op.source), short_name(op.dtype))
        table.add_row(*row, *_cells(op.numbers))
    return table


def _badness(numbers: Numbers) -> tuple[bool, float, float]:
    return numbers.overflowed > 0, numbers.flushed, numbers.local or 0.0


def _table(texts: Sequence[str], counts: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 1, 0, 0))
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in (*counts, "alone", "from start", "largest", "overflow", "to zero"):
        table.add_column(heading, justify="right", overflow="fold")
    return table


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
