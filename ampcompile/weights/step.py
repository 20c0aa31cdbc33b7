"""The copies that a step writes together with the weights, so that no graph has to cast them."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from . import gpu, table
from .store import store


class WritableCopies:
    """16-bit copies that a step may write with its weights; see `writable_copies`.

    `buffers`: those of each weight, by its index in the step's parameters, laid out as the weight.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.buffers: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._copies = []
        if not store.keys:
            self._handle = 0
            return
        room = 4 * len(params)
        opened, (indices, handles) = np.zeros(1, np.int64), np.zeros((2, room), np.int64)
        addresses = (opened.ctypes.data, indices.ctypes.data, handles.ctypes.data, room)
        found = store.table.open_step(tuple(params), len(params), *addresses)
        self._handle = int(opened[0])
        weakref.finalize(self, store.table.drop, self._handle).atexit = False
        for i, buffer in zip(indices.tolist(), found, strict=False):
            self.buffers[i].append(buffer)
        if found and found[0].is_cuda:
            self._copies = [store.by_handle[handle] for handle in handles[: len(found)].tolist()]
            if gpu.capturing(params[:1]):
                store.captured.update(self._copies)
                for copy in self._copies:
                    copy.keep_in_place()
            else:
                gpu.follow(self._copies)

    def mark_written(self) -> None:
        """Mark them fresh: the step has written them from the weights' new values, and raised the versions of both.

        Other copies of the weights' memory are cast in the next call.
        """
        if self._handle:
            with store.lock:
                store.table.close_step(self._handle)
                gpu.cast_done(self._copies)


def writable_copies(params: Sequence[Tensor]) -> WritableCopies:
    """Take the copies of parameters (parts of DTensors) that a step may write: fresh ones that no backward waits for.

    Until `mark_written`, no copy of the parameters' memory counts as fresh; so nothing is lost if the step fails. If
    the step is captured in a CUDA graph, the copies keep their addresses for as long as the weights' memory lives.
    """
    with store.lock:
        return WritableCopies(params)
