"""Who else shares a weight's memory: a search through all tensors that Python knows, for sharers nobody named."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable

from torch import Tensor

from .weights_memory import Memory, copied_memory_at

_SHARE = 0.02
_AT_FIRST = 0.5
_began = time.monotonic()
_spent = 0.0


def find_sharers(memories: Iterable[Memory], aliases: Iterable[Tensor]) -> None:
    """Make the tensors known that share these memories: kept views, a state_dict, the flat buffer of an optimizer.

    `aliases` are the caller's, which nobody else has. Walking the heap takes a tenth of a second where it holds a
    million objects: beyond the first half second, all searches together may take a fiftieth of the process's time.
    Weights are cast at each call until then.
    """
    global _spent
    start = time.monotonic()
    if _spent > _AT_FIRST + _SHARE * (start - _began):
        return
    known = {memory.key: {sharer.key for sharer in memory.sharers} | set(map(id, aliases)) for memory in memories}
    for found in [each for each in gc.get_objects() if issubclass(type(each), Tensor)]:
        memory = copied_memory_at(found)
        if memory is not None and id(found) not in known.get(memory.key, (id(found),)):
            memory.admit(found)
    _spent += time.monotonic() - start
