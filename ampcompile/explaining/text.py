"""Render text for a terminal: the tables and lines that reports, audits and the command line print."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

_UNLIMITED = 10_000


def text_of(parts: Iterable[str | Table], width: int | None = None) -> str:
    """The parts one below the other, at most `width` columns wide; default: a terminal's width, or else no limit."""
    console = Console(
        file=io.StringIO(),
        width=width or shutil.get_terminal_size((_UNLIMITED, 24)).columns,
        highlight=False,
        color_system=None,
        markup=False,
    )
    for part in parts:
        console.print(part)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def table_of(texts: Sequence[str], numbers: Sequence[str] = (), gap: int = 1) -> Table:
    """An empty table with these headings, columns of numbers to the right; without headings if all are empty."""
    headed = any(texts) or any(numbers)
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, gap, 0, 0), show_header=headed)
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def render_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The rows under their headings, as text."""
    table = table_of(headings, gap=2)
    for row in rows:
        table.add_row(*row)
    return text_of([table])


def human_bytes(count: int) -> str:
    """`1.5 MiB`, `640 B`."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
