"""Text and pages: tables that fit a terminal, and the self-contained page of a report."""

from __future__ import annotations

import io
import json
import linecache
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from .records import plain

if TYPE_CHECKING:
    from .report import Report

_UNLIMITED = 10_000


def text_of(parts: Iterable[str | Table]) -> str:
    """The parts one below the other, at most as wide as the terminal, if it has a width."""
    console = Console(
        file=io.StringIO(),
        width=shutil.get_terminal_size((_UNLIMITED, 24)).columns,
        highlight=False,
        color_system=None,
        markup=False,
    )
    for part in parts:
        console.print(part)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


@contextmanager
def show_progress(words: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr, if it is a terminal, what is going on; yield the function that says more."""
    with Console(stderr=True).status(words) as status:
        yield status.update


def table(texts: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]], gap: int = 1) -> Table:
    """The rows under these headings, columns of numbers to the right; without headings if all are empty."""
    headed = any(texts) or any(numbers)
    made = Table(box=None, pad_edge=False, header_style="", padding=(0, gap, 0, 0), show_header=headed)
    for heading in texts:
        made.add_column(heading, overflow="fold")
    for heading in numbers:
        made.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def render_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The rows under their headings, as text."""
    return text_of([table(headings, (), rows, gap=2)])


def human_bytes(count: int) -> str:
    """`1.5 MiB`, `640 B`."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def error_text(value: float | None) -> str:
    """An error as text; empty if it wasn't measured."""
    if value is None:
        return ""
    return "not finite" if math.isnan(value) else "infinite" if math.isinf(value) else f"{value:.1e}"


def report_page(report: Report) -> str:
    """The page of a report: the graph by module, searchable, all casts with sizes and reasons.

    The text loads no other files, so it opens from a disk or an attachment.
    """
    sources = {each.source for each in (*(value for graph in report.graphs for value in graph.values), *report.casts)}
    lines = {source: line for source in sources if (line := _line(source))}
    data = report.as_dict() | {name: plain(getattr(report, name)) for name in ("gain", "notes", "balance")}
    folder = files(__package__) / "page"
    text = json.dumps(data | {"lines": lines}, separators=(",", ":"), allow_nan=False)
    parts = {"data": text.replace("<", "\\u003c")}  # data inside a script element must not contain its end tag

    def read(file: str) -> str:
        return (folder / file).read_text(encoding="utf-8")

    # One substitution for all: inserted text may look like a placeholder itself.
    return re.sub(r"/\*([a-z.]+)\*/", lambda match: parts.get(match[1]) or read(match[1]), read("page.html"))


def _line(source: str) -> str:
    path, _, number = source.rpartition(":")
    return linecache.getline(path, int(number)).strip() if path else ""


def frame(text: str) -> str:
    """Return a page as an element of a notebook: in a frame, where neither its styles nor its names meet others."""
    return f'<iframe srcdoc="{escape(text)}" style="width: 100%; height: 600px; border: 0"></iframe>'
