"""A plain table of texts that fits a terminal."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def render_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The rows under their headings, at most as wide as the terminal."""
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 2, 0, 0), show_header=any(headings))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    width = shutil.get_terminal_size((120, 24)).columns
    console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None, markup=False)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())
