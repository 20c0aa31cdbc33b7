"""The copies that a step writes together with the weights, so that no graph has to cast them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from . import gpu
from .store import store


class WritableCopies:
    """16-bit copies that a step may write with its weights; see `writable_copies`.

    `buffers`: those of each weight, by its index in the step's parameters, laid out as the weight.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params, self._copies = tuple(params) if store.keys else (), []
        self.buffers: defaultdict[int, list[Tensor]] = defaultdict(list)
        room = 4 * len(self._params)
        indices, self._handles = np.zeros((2, room), np.int64)
        rows = (indices.ctypes.data, self._handles.ctypes.data, room)
        found = store.table.open_step(self._params, len(self._params), *rows) if room else []
        for i, buffer in zip(indices.tolist(), found, strict=False):
            self.buffers[i].append(buffer)
        self._copies = [store.by_handle[handle] for handle in self._handles[: len(found)].tolist()]
        if self._copies and self._copies[0].on_gpu:
            if gpu.capturing(params):
                store.captured.update(self._copies)
                for copy in self._copies:
                    copy.keep_in_place()
            else:
                gpu.follow(self._copies)

    def mark_written(self) -> None:
        """Mark them fresh: the step has written them from the weights' new values, and raised the versions of both.

        Other copies of the weights' memory are cast in the next call.
        """
        if self._params:
            with store.lock:
                arguments = self._params, len(self._params), self._handles.ctypes.data, len(self._copies)
                store.table.close_step(*arguments)
                gpu.cast_done(self._copies)


def writable_copies(params: Sequence[Tensor]) -> WritableCopies:
    """Take the copies of parameters (parts of DTensors) that a step may write: fresh ones that no backward waits for.

    Until `mark_written`, no copy of the parameters' memory counts as fresh; so nothing is lost if the step fails. If
    the step is captured in a CUDA graph, the copies keep their addresses for as long as the weights' memory lives.
    """
    with store.lock:
        return WritableCopies(params)
