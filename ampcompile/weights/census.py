"""Who else shares a weight's memory: a search through all tensors that Python knows, for sharers nobody named."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterable, Sequence

from torch import Tensor

from .memory import Memory, copied_memory_at

_SHARE = 0.05
_AT_FIRST = 1.0
_began = time.monotonic()
_spent = 0.0
_LASTS = 8, 5.0
"""Calls in a row and seconds from which on an unknown sharer is no passing one, as another thread's call makes them."""
_log = logging.getLogger("ampcompile")


def unexplained(memories: Sequence[Memory], aliases: Sequence[Tensor]) -> list[Memory]:
    """Those of some memories, one for each of the caller's aliases, that are shared by more than can be found.

    Found are kept views, a state_dict, the flat buffer of an optimizer: what is a tensor in Python. Walking the whole
    heap takes a tenth of a second where it holds a million objects. So no search goes beyond what was made lately once
    all searches took a second and a twentieth of the process's time; weights are cast at each call until then.
    """
    global _spent
    counts = {memory: 0 for memory in memories}
    for memory in memories:
        counts[memory] += 1
    left = [memory for memory in counts if memory.examine(counts[memory])]
    start = time.monotonic()
    for generation in range(3):
        if not left or (generation == 2 and _spent > _AT_FIRST + _SHARE * (start - _began)):
            break
        _admit_tensors(gc.get_objects(generation), left, set(map(id, aliases)))
        left = [memory for memory in left if memory.examine(counts[memory])]
    _spent += time.monotonic() - start
    for memory in left:
        _warn_if_it_lasts(memory, start)
    return left


def _warn_if_it_lasts(memory: Memory, now: float) -> None:
    if not memory.unexplained:
        memory.since = now
    memory.unexplained += 1
    if memory.unexplained >= _LASTS[0] and now - memory.since >= _LASTS[1] and not memory.reported:
        memory.reported = True
        _log.warning(
            "a weight of %d bytes is compared or cast at every call: something that isn't known shares its memory "
            "and may write there (a view that C++ code or a pending backward keeps, a storage, another process)",
            memory.end - memory.begin,
        )


def _admit_tensors(objects: list[object], memories: Iterable[Memory], but: set[int]) -> None:
    """Know the tensors among some objects that share one of some memories."""
    wanted = {memory.key: but.union(sharer.key for sharer in memory.sharers) for memory in memories}
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    for found in [each for each in objects if type(each) in kinds]:
        assert isinstance(found, Tensor)
        memory = copied_memory_at(found)
        if memory is not None and id(found) not in wanted.get(memory.key, (id(found),)):
            memory.admit(found)
