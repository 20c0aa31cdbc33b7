"""The state of the amp-compiled call that a thread is in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


class CallState(threading.local):
    """One for each thread; outside of such calls it has these defaults."""

    callable: Any = None
    """What torch.compile was given; None outside of a call."""
    graphs: Any = None
    """Collects what is compiled in the call, where somebody wants to know."""
    low_dtype: torch.dtype | None = None
    """The call's low-precision type; None where autocast is off by the user's wish, too."""
    widens: bool = False
    """Whether what the call returns leaves it in float32."""
    widened: bool = False
    """Whether a graph has widened all of it."""
    cast: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None
    """Widens results of one memory that no graph has widened, where somebody wants to see that."""


current_call = CallState()


@contextlib.contextmanager
def casting(cast: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]) -> Iterator[None]:
    """Have a function widen the results of calls that no graph has widened, those of one memory at a time."""
    current_call.cast, outer = cast, current_call.cast
    try:
        yield
    finally:
        current_call.cast = outer
