"""Progress on stderr: a spinner or bar on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console

Say = Callable[[str], None]


@contextlib.contextmanager
def saying(console: Console, words: str) -> Iterator[Say]:
    """Show `words` during the context; yields a function that shows a further step."""
    if console.is_terminal:
        with console.status(words) as status:
            yield status.update
    else:
        say = lines(console)
        say(words)
        yield say


def lines(console: Console) -> Say:
    """A function that prints each step on a line of its own."""
    return lambda words: console.print(words, markup=False, highlight=False, soft_wrap=True)
