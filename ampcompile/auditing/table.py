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
from .records import ModuleNumbers, OpNumbers

if TYPE_CHECKING:
    from .recording import Recording
    from .result import Audit

MODULES, OPS, NAMES = 40, 10, 3
"""Most rows of the tables of modules and of ops, and most names in a line."""
NUMBERS = ("alone", "from start", "largest", "overflow", "to zero")
"""Headings of the columns that show a row's `Numbers`."""


def render(audit: Audit, width: int | None = None) -> str:
    """Return the tables as text, at most `width` columns wide (default: the terminal's)."""
    lost = [op for op in audit.ops if op.numbers.not_finite or op.numbers.not_finite_exact]
    exact = [f"in {short_name(audit.against)}"] if any(op.numbers.not_finite_exact for op in lost) else []
    columns = [*NUMBERS, "not finite", *exact] if lost else NUMBERS
    parts: list[str | Table] = [
        *_headlines(audit, [op.numbers for op in lost]),
        "",
        _module_table(audit.modules, columns),
        "",
        _op_table(audit.ops, columns, lost),
        "",
        f"alone: an op's own error, against {short_name(audit.against)} on the same operands; from start: of all ops "
        "so far; largest: magnitude; overflow, to zero: shares of the elements that float32 would keep"
        + "; not finite: share of NaN and infinities"
        * bool(lost),
    ]
    if audit.unmeasured:
        parts.append(f"not run in high precision: {', '.join(audit.unmeasured)}")
    return text_of(parts, width)


def _headlines(audit: Audit, lost: Sequence[Numbers]) -> list[str]:
    exact = short_name(audit.against)
    lines = [f"mixed run against {exact}: {len(audit.ops)} ops"]
    if audit.not_finite:
        named = [f"{name} ({_share(share)})" for name, share in audit.not_finite.items()]
        lines.append(f"not finite: {_shorten(named)}")
    if lost:
        runs = {(True, True): "both runs", (True, False): "the mixed run", (False, True): f"the {exact} run"}
        run = runs[lost[0].not_finite > 0, lost[0].not_finite_exact > 0]
        lines.append(f"first not finite: {audit.first_not_finite}, in {run}; {len(lost)} ops in all")
    if audit.outputs:
        lines.append(f"relative error of the outputs: {', '.join(map(error_text, audit.outputs))}")
    if audit.gradient_error is not None:
        lines.append(f"relative error of all gradients together: {error_text(audit.gradient_error)}")
    lines.append(f"first overflow: {audit.first_overflow or 'none'}")
    lines.append(f"first flush to zero: {audit.first_underflow or 'none'}")
    return lines


def _shorten(names: Sequence[str]) -> str:
    more = len(names) - NAMES
    return ", ".join(names[:NAMES]) + (f" and {more} more" if more > 0 else "")


def _module_table(modules: Sequence[ModuleNumbers], columns: Sequence[str]) -> Table:
    shown = sorted(modules, key=lambda m: _badness(m.numbers), reverse=True)[:MODULES]
    title = "module" if len(shown) == len(modules) else f"module (the worst {len(shown)} of {len(modules)})"
    table = table_of([title], ["ops", *columns])
    for module in modules:
        if module in shown:
            table.add_row(module.module or "(none)", str(module.ops), *_cells(module.numbers)[: len(columns)])
    return table


def _op_table(ops: Sequence[OpNumbers], columns: Sequence[str], lost: Sequence[OpNumbers]) -> Table:
    """Make the table of the worst ops, below the first of `lost`: NaN in all that follow may come from there."""
    table = table_of(["op, the worst first", "module", "line", "dtype"], columns)
    for op in sorted(ops, key=lambda op: (op in lost[:1], _badness(op.numbers)), reverse=True)[:OPS]:
        row = (op.name, op.module or "(none)", os.path.basename(op.source), short_name(op.dtype))
        table.add_row(*row, *_cells(op.numbers)[: len(columns)])
    return table


def _badness(numbers: Numbers) -> tuple[bool, float, float]:
    local = numbers.local or 0.0
    return numbers.overflowed > 0, numbers.flushed, 0.0 if math.isnan(local) else local


def _cells(numbers: Numbers) -> tuple[str, ...]:
    return (
        error_text(numbers.local),
        error_text(numbers.cumulative),
        f"{numbers.largest:.1e}",
        _share(numbers.overflowed),
        _share(numbers.flushed),
        _share(numbers.not_finite),
        _share(numbers.not_finite_exact),
    )


def render_recording(recorded: Recording, width: int | None = None) -> str:
    """Return the steps and results of a recording as tables."""
    steps = table_of(["input or op", "module", "line", "dtype", "shape"], ["alone", "from start"])
    for step in recorded.steps:
        place, shape = step.place, "x".join(map(str, step.shape))
        errors = map(error_text, (step.alone, step.from_start))
        steps.add_row(place.name, place.module, os.path.basename(place.source), step.dtype, shape, *errors)
    results = table_of(["result"], ["error by its ops", "of the call"])
    for name, result in recorded.results.items():
        results.add_row(name, error_text(result.ops), error_text(result.call))
    return text_of([steps, "", results], width)


def error_text(value: float | None) -> str:
    """Return an error as text; empty if it wasn't measured."""
    if value is None:
        return ""
    return "not finite" if math.isnan(value) else "infinite" if math.isinf(value) else f"{value:.1e}"


def _share(value: float) -> str:
    return "" if not value else f"{value:.1%}" if value >= 0.001 else "<0.1%"
