"""Render a comparison as a self-contained page: a row for each op, with the numbers of both runs and their limits."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ampcompile.explaining.html import fill

from .recording import Step
from .rows import Row
from .table import error_text

if TYPE_CHECKING:
    from .compare import Comparison


def page(comparison: Comparison) -> str:
    """The page's text. Only what recordings hold is in it: no file that they name is read."""
    return fill("compare.html", __package__, _data(comparison))


def _data(comparison: Comparison) -> dict[str, Any]:
    return {
        "headlines": comparison.headlines,
        "agree": comparison.agree,
        "first": comparison.first and comparison.first.row,
        "why": comparison.first and comparison.first.why,
        "files": comparison.files,
        "settings": comparison.settings,
        "rows": [_row(row) for row in comparison.rows],
    }


def _row(row: Row) -> dict[str, Any]:
    place, limits = row.place, row.limits
    return {
        "op": place.op,
        "module": place.module,
        "source": place.source,
        "line": os.path.basename(place.source),
        "backward": place.backward,
        "a": _step(row.a),
        "b": _step(row.b),
        "apart": _text(row.apart),
        "so_far": [_text(error) for error in row.so_far],
        "limits": limits and [error_text(limit) for limit in (limits.apart, limits.alone, limits.so_far)],
        "exceeds": row.exceeds,
        "why": row.why,
    }


def _step(step: Step | None) -> dict[str, Any] | None:
    """Numbers as text, since JSON has neither NaN nor infinity."""
    if step is None:
        return None
    return {
        "dtype": step.dtype,
        "shape": [str(size) for size in step.shape],
        "norm": f"{step.exact[0]:.4g}",
        "alone": _text(step.alone),
        "from_start": _text(step.from_start),
        "source": step.place.source,
    }


def _text(error: float | None) -> str:
    return "0" if error == 0 else error_text(error)
