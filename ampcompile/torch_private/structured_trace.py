"""torch's structured trace, which is private."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from torch._logging import _internal

from . import patches


def traced() -> bool:
    """Return True if a structured trace is being written (`TORCH_TRACE`)."""
    return bool(_internal.trace_log.handlers)


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Add an artifact of the graph being compiled to the structured trace, if there is one."""
    _internal.trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload)


@contextlib.contextmanager
def artifacts_of_this_compile() -> Iterator[list[tuple[str, str]]]:
    """Collect (name, text) of every artifact that torch's compilers offer to the structured trace meanwhile."""
    artifacts: list[tuple[str, str]] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            metadata, text = getattr(record, "metadata", {}), getattr(record, "payload", None)
            name = metadata.get("artifact", {}).get("name") or next(iter(metadata), "")
            if isinstance(text, str):
                artifacts.append((name, text))

    with patches.trace_handler(Collector()):
        yield artifacts
