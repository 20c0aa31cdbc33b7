"""Text: tables that fit a terminal, numbers as people read them, progress."""

import io
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

_UNLIMITED = 10_000


def text_of(parts: Iterable[str | Table]) -> str:
    """The parts one below the other, at most as wide as the terminal, if it has a width."""
    file = io.StringIO()
    console = Console(
        file=file,
        width=shutil.get_terminal_size((_UNLIMITED, 24)).columns,
        highlight=False,
        color_system=None,
        markup=False,
    )
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


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
