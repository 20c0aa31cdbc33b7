"""Who else shares a weight's memory: a search through all tensors that Python knows, for sharers nobody named."""

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
"""Of the process's time, for searches of the whole heap."""
_MOST = 1.0
"""Seconds of it that are saved up at most: else a day's share would go into slow calls one after the other."""
_saved, _noted = _MOST, time.monotonic()
_LASTS = 8, 5.0
"""Calls in a row and seconds from which on an unknown sharer is no passing one, as another thread's call makes them."""
_log = logging.getLogger("ampcompile")


def unexplained(memories: Sequence[Memory], aliases: Sequence[Tensor]) -> list[Memory]:
    """Those of some memories, one for each of the caller's aliases, that are shared by more than can be found.

    Found are kept views, a state_dict, the flat buffer of an optimizer: what is a tensor in Python. Walking the whole
    heap takes a tenth of a second where it holds a million objects. So there is a limit to the time for that, beyond
    which no search goes past what was made lately, and weights are cast at each call. What NumPy or DLPack gave out
    isn't searched for: it is no tensor that anybody could watch.
    """
    global _saved, _noted
    counts = {memory: 0 for memory in memories}
    for memory in memories:
        counts[memory] += 1
    left = [memory for memory in counts if memory.examine(counts[memory])]
    start = time.monotonic()
    _saved = min(_MOST, _saved + _SHARE * (start - _noted))
    for generation in range(3 if _saved > 0 else 2):
        if not (wanted := [memory for memory in left if memory.examine(counts[memory]) != memory.exports()]):
            break
        _admit_tensors(gc.get_objects(generation), wanted, set(map(id, aliases)))
    left = [memory for memory in left if memory.examine(counts[memory])]
    _noted = time.monotonic()
    _saved -= _noted - start
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
            "and may write there (a NumPy array, a view that C++ code or a pending backward keeps, another process)",
            memory.end - memory.begin,
        )


def _admit_tensors(objects: list[object], memories: Iterable[Memory], but: set[int]) -> None:
    """Know the tensors among some objects that share one of some memories, but for those that arrays hold."""
    known = {memory.key: but.union(memory.exported, (sharer.key for sharer in memory.sharers)) for memory in memories}
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor) and kind is not storages.Exported}
    tensors = [each for each in objects if type(each) in kinds and isinstance(each, Tensor)]
    sharers = [
        (tensor, memory)
        for tensor in tensors
        if (memory := copied_memory_at(tensor)) is not None and id(tensor) not in known.get(memory.key, (id(tensor),))
    ]
    doubtful = {id(tensor): tensor for tensor, _ in sharers if storages.may_be_in_arrays(tensor)}
    if _saved <= 0:  # no time to look who holds them: they stay unknown
        sharers = [(tensor, memory) for tensor, memory in sharers if id(tensor) not in doubtful]
        doubtful = {}
    arrays = _held_out_of_sight(list(doubtful.values()))
    for tensor, memory in sharers:
        if id(tensor) in arrays:
            memory.exported[id(tensor)] = storages.TensorHandle(tensor)
        else:
            memory.admit(tensor)


def _held_out_of_sight(tensors: list[Tensor]) -> set[int]:
    """The ids of those that somebody holds whom Python's collector doesn't show: an array, or a function's variable."""
    if not tensors:
        return set()
    tensors.append(torch.empty(0))  # which nobody else holds
    objects, seen = gc.get_objects(), Counter[int]()
    holders = list(map(sys.getrefcount, tensors))
    watched = set(map(id, tensors)).__contains__
    for start in range(0, len(objects), 10_000):
        seen.update(filter(watched, map(id, gc.get_referents(*objects[start : start + 10_000]))))
    unseen = [count - seen[id(tensor)] for tensor, count in zip(tensors, holders, strict=True)]
    return {id(tensor) for tensor, count in zip(tensors, unseen, strict=True) if count > unseen[-1]}
