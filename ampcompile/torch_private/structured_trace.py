"""torch's structured trace, which is private."""

from __future__ import annotations

from collections.abc import Callable

from torch._logging import _internal


def traced() -> bool:
    """Return True if a structured trace is being written (`TORCH_TRACE`)."""
    return bool(_internal.trace_log.handlers)


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Add an artifact of the graph being compiled to the structured trace, if there is one."""
    _internal.trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload)
