"""The backend: the compiler between `torch.compile` and the code that runs, and the work around each call.

Here stands the state of the amp-compiled call that a thread is in.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


class CallState(threading.local):
    """The state of one thread; outside of such calls it has these defaults."""

    callable: Any = None  # the callable given to torch.compile; None outside of a call
    graphs: list[Any] | None = None  # gets the names in each graph that is compiled or, under a policy, run in the call
    before_compiling: Callable[[], None] | None = None  # of the outermost call: called before a graph is compiled in it
    cast: Callable[[torch.Tensor], torch.Tensor] | None = None  # makes results float32; None: `Tensor.float`


current_call = CallState()


@contextlib.contextmanager
def within_call(**state: Any) -> Iterator[None]:
    """Set fields of `current_call` in the context."""
    outer = {name: getattr(current_call, name) for name in state}
    vars(current_call).update(state)
    try:
        yield
    finally:
        vars(current_call).update(outer)
