"""The state of the amp-compiled call that a thread is in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


class CallState(threading.local):
    """The state of one thread; outside of such calls it has these defaults."""

    callable: Any = None
    """The callable given to torch.compile; None outside of a call."""
    graphs: Any = None
    """Collector of the graphs compiled in the call, or None."""
    low_dtype: torch.dtype | None = None
    """The call's low-precision type; None outside of calls, and if the user disabled autocast."""
    widens: bool = False
    """True if the call's low-precision results are returned in float32."""
    widened: bool = False
    """True if a graph has widened all results."""
    cast: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None
    """Function that widens results that share memory and that no graph has widened; None for the default."""


current_call = CallState()


@contextlib.contextmanager
def casting(cast: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]) -> Iterator[None]:
    """Let `cast` widen the results of calls that no graph has widened, once for each group that shares memory."""
    current_call.cast, outer = cast, current_call.cast
    try:
        yield
    finally:
        current_call.cast = outer
