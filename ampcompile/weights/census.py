"""Find the untracked tensors that share a weight's memory, by walking Python's heap."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ampcompile.torch_private import storages

from .memory import Memory, copied_memory_at

_SHARE = 0.05
"""Share of the process's time that searches of the whole heap may take."""
_MOST = 1.0
"""Seconds of search time saved up at most: else a day's share would go into consecutive slow calls."""
_budget, _budget_at = _MOST, time.monotonic()
_LASTS = 8, 5.0
"""Calls in a row, and seconds, after which an unknown sharer is no passing one, such as another thread's call makes."""
_log = logging.getLogger("ampcompile")


def unexplained(memories: Sequence[Memory], aliases: Sequence[Tensor]) -> list[Memory]:
    """Return those of `memories`, one for each of the caller's aliases, that have sharers which the search can't find.

    The search finds sharers that are tensors in Python: kept views, a state_dict, the flat buffer of an optimizer.
    Walking a heap of a million objects takes a tenth of a second, so the time for it is limited: beyond the limit only
    recently made objects are searched, and weights are cast at each call. Memory that NumPy or DLPack exported isn't
    searched for: nobody has a tensor there whose version could be watched.
    """
    global _budget, _budget_at
    counts = {memory: 0 for memory in memories}
    for memory in memories:
        counts[memory] += 1
    unresolved = [memory for memory in counts if memory.examine(counts[memory])]
    start = time.monotonic()
    _budget = min(_MOST, _budget + _SHARE * (start - _budget_at))
    for generation in range(3 if _budget > 0 else 2):
        if not (unsearched := [memory for memory in unresolved if memory.examine(counts[memory]) != memory.exports()]):
            break
        _admit_tensors(gc.get_objects(generation), unsearched, set(map(id, aliases)))
    unresolved = [memory for memory in unresolved if memory.examine(counts[memory])]
    _budget_at = time.monotonic()
    _budget -= _budget_at - start
    for memory in unresolved:
        _warn_if_it_lasts(memory, start)
    return unresolved


def _warn_if_it_lasts(memory: Memory, now: float) -> None:
    if not memory.unexplained:
        memory.since = now
    memory.unexplained += 1
    if memory.unexplained >= _LASTS[0] and now - memory.since >= _LASTS[1] and not memory.reported:
        memory.reported = True
        _log.warning(
            "a weight of %d bytes is compared or cast at every call: something that isn't known shares its memory "
            "and may write there (a NumPy array, a view that C++ code or a pending backward keeps, another process)",
            memory.end - memory.begin,
        )


def _admit_tensors(objects: list[object], memories: Iterable[Memory], own: set[int]) -> None:
    """Track the tensors among `objects` that share one of `memories`, except those that arrays hold."""
    ids = {memory.key: own.union(memory.exported, (sharer.key for sharer in memory.sharers)) for memory in memories}
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor) and kind is not storages.Exported}
    tensors = [value for value in objects if type(value) in kinds and isinstance(value, Tensor)]
    sharers = [
        (tensor, memory)
        for tensor in tensors
        if (memory := copied_memory_at(tensor)) is not None and id(tensor) not in ids.get(memory.key, (id(tensor),))
    ]
    doubtful = {id(tensor): tensor for tensor, _ in sharers if storages.may_be_in_arrays(tensor)}
    if _budget <= 0:  # no time left to search for their holders: they stay untracked
        sharers = [(tensor, memory) for tensor, memory in sharers if id(tensor) not in doubtful]
        doubtful = {}
    arrays = _with_hidden_holders(list(doubtful.values()))
    for tensor, memory in sharers:
        if id(tensor) in arrays:
            memory.exported[id(tensor)] = storages.TensorHandle(tensor)
        else:
            memory.admit(tensor)


def _with_hidden_holders(tensors: list[Tensor]) -> set[int]:
    """Return the ids of tensors with a holder that Python's collector doesn't show: an array, or a local variable."""
    if not tensors:
        return set()
    tensors.append(torch.empty(0))  # for comparison: nothing else holds it
    objects, visible = gc.get_objects(), Counter[int]()
    references = list(map(sys.getrefcount, tensors))
    watched = set(map(id, tensors)).__contains__
    for start in range(0, len(objects), 10_000):
        visible.update(filter(watched, map(id, gc.get_referents(*objects[start : start + 10_000]))))
    hidden = [count - visible[id(tensor)] for tensor, count in zip(tensors, references, strict=True)]
    return {id(tensor) for tensor, count in zip(tensors, hidden, strict=True) if count > hidden[-1]}
