"""Our parts of what torch shows: regions in a profile (0.4 us a call while no profiler runs), the structured trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._C._profiler import _RecordFunctionFast
from torch._logging import _internal

_Takes = ParamSpec("_Takes")
_Gives = TypeVar("_Gives")


region = _RecordFunctionFast  # opens a region of a name, as `with region("amp: refresh"):`


def named(name: str) -> Callable[[Callable[_Takes, _Gives]], Callable[_Takes, _Gives]]:
    """Return a decorator: profiles show each call of the function as a region of this name."""

    def decorate(function: Callable[_Takes, _Gives]) -> Callable[_Takes, _Gives]:
        @functools.wraps(function)
        def in_region(*args: _Takes.args, **kwargs: _Takes.kwargs) -> _Gives:
            with region(name):
                return function(*args, **kwargs)

        return in_region

    return decorate


def traced() -> bool:
    """Return True if a structured trace is being written (`TORCH_TRACE`)."""
    return bool(_internal.trace_log.handlers)


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Add an artifact of the graph being compiled to the structured trace, if there is one."""
    _internal.trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload)
