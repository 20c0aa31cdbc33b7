"""Which frames Dynamo tried to compile, and why it gave some up, by its own counters. All private."""

from __future__ import annotations

from collections import Counter

from torch._dynamo.utils import counters


def count() -> tuple[int, Counter[str]]:
    """How many frames have been tried so far, and how often each reason stopped one."""
    return counters["frames"]["total"], Counter(counters["graph_break"]) + Counter(counters["unimplemented"])


def failed_since(before: tuple[int, Counter[str]]) -> str | None:
    """The reasons since then, a line each, none where Dynamo has no complaint; None if no frame was tried since."""
    tried, reasons = count()
    if tried == before[0]:
        return None
    return "; ".join(dict.fromkeys(reason.splitlines()[0] for reason in reasons - before[1]))
