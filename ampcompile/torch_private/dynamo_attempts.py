"""Dynamo's attempts to compile frames: how many, why some were given up, and what to do around each. All private."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from traceback import FrameSummary

from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters


def count() -> tuple[int, Counter[str]]:
    """Return the number of frames tried so far, and how often each reason stopped one."""
    return counters["frames"]["total"], Counter(counters["graph_break"]) + Counter(counters["unimplemented"])


def reasons_since(before: tuple[int, Counter[str]]) -> list[str]:
    """Return the reasons since then, each once."""
    return list(count()[1] - before[1])


def failed_since(before: tuple[int, Counter[str]]) -> str | None:
    """Return the first lines of the reasons since then, empty if there are none; None if no frame was tried since."""
    if count()[0] == before[0]:
        return None
    return "; ".join(dict.fromkeys(reason.splitlines()[0] for reason in reasons_since(before)))


def in_short(reason: str, user_stack: Sequence[FrameSummary] = ()) -> str:
    """Return a reason of Dynamo's in one line: its explanation and its first hint, and the user's line."""
    title, *more = reason.splitlines()
    parts = [line.split(": ", 1)[1] for line in more if line.startswith(("  Explanation: ", "  Hint: "))][:2]
    text = re.sub(r"<function ([^ ]+) at 0x\w+>", r"\1", " ".join(f"{part.rstrip('.')}." for part in parts) or title)
    if title.startswith("generic_jump") or "data-dependent branching" in reason.lower():
        text = "Python branches on the value of a tensor."
    frames = list(user_stack)[-1:]
    return text + "".join(f" {frame.filename}:{frame.lineno}: {frame.line}" for frame in frames)


@contextmanager
def around_compiling(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Call `begin` and `end` around each compilation of Dynamo in this context."""
    started, ended = (lambda _: begin()), (lambda _: end())
    callback_handler.register_start_callback(started)
    callback_handler.register_end_callback(ended)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(started)
        callback_handler.remove_end_callback(ended)
