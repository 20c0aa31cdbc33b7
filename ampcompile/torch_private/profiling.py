"""Regions that torch.profiler shows, at 0.4 us a call while no profiler runs; the public ones take 14."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._C._profiler import _RecordFunctionFast

_Takes = ParamSpec("_Takes")
_Gives = TypeVar("_Gives")


region = _RecordFunctionFast
"""Opens a region of a name, as `with region("amp: refresh"):`."""


def named(name: str) -> Callable[[Callable[_Takes, _Gives]], Callable[_Takes, _Gives]]:
    """Return a decorator: profiles show each call of the function as a region of this name."""

    def decorate(function: Callable[_Takes, _Gives]) -> Callable[_Takes, _Gives]:
        @functools.wraps(function)
        def in_region(*args: _Takes.args, **kwargs: _Takes.kwargs) -> _Gives:
            with region(name):
                return function(*args, **kwargs)

        return in_region

    return decorate
