"""Dynamo's counters of the frames that it tried to compile, and of its reasons to give some up. All private."""

from __future__ import annotations

from collections import Counter

from torch._dynamo.utils import counters


def count() -> tuple[int, Counter[str]]:
    """Return the number of frames tried so far, and how often each reason stopped one."""
    return counters["frames"]["total"], Counter(counters["graph_break"]) + Counter(counters["unimplemented"])


def failed_since(before: tuple[int, Counter[str]]) -> str | None:
    """Return the first lines of the reasons since then, empty if there are none; None if no frame was tried since."""
    tried, reasons = count()
    if tried == before[0]:
        return None
    return "; ".join(dict.fromkeys(reason.splitlines()[0] for reason in reasons - before[1]))
