"""The copies that a step writes together with the weights, so that no graph has to cast them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .copies import Copy, capturing, cast_done, cast_into, wait_for_casts
from .spec import Form
from .store import store

QUANTIZED = Form(torch.float8_e4m3fn)


class WritableCopies:
    """Copies that a step may write with its weights; see `writable_copies`.

    `by_kernel`: by the weight's index in the step's parameters, the first rounded copy of a float32 weight, with the
    type that it is rounded to; `quantized`: those that lie row by row, with the weights. Kernels write these, and
    the others are cast.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._open, self._copies = False, list[Copy]()
        self.params = tuple(params) if store.keys else ()
        self.by_kernel: dict[int, tuple[Tensor, torch.dtype]] = {}
        self.quantized: dict[int, tuple[Tensor, Tensor]] = {}
        self.others: list[tuple[Form, Tensor, Tensor]] = []
        room = 4 * len(self.params)
        indices, self._handles = np.zeros((2, room), np.int64)
        rows = (indices.ctypes.data, self._handles.ctypes.data, room)
        self._open = room > 0
        buffers = store.table.open_step(self.params, len(self.params), *rows) if room else []
        self._copies = [store.by_handle[handle] for handle in self._handles[: len(buffers)].tolist()]
        self._weights = [self.params[i] for i in indices[: len(buffers)].tolist()]
        for i, weight, copy, buffer in zip(indices.tolist(), self._weights, self._copies, buffers, strict=False):
            if copy.form == QUANTIZED and weight.is_contiguous():
                self.quantized[i] = buffer, weight
            elif weight.dtype == torch.float32 and not copy.form.quantized and i not in self.by_kernel:
                self.by_kernel[i] = buffer, copy.form.dtype
            else:
                self.others.append((copy.form, buffer, weight))
        if self._copies and self._copies[0].on_gpu:
            if capturing(params):
                store.captured.update(self._copies)
                for copy in self._copies:
                    copy.keep_in_place()
            else:
                wait_for_casts(self._copies)

    def mark_written(self) -> None:
        """Mark them fresh: the step has written those for kernels from the weights' new values, whose versions it has
        raised once. Casts the others. Copies of the weights' memory that aren't here are cast in the next call.
        """
        written = [buffer for buffer, _ in (*self.by_kernel.values(), *self.quantized.values())]
        torch.autograd.graph.increment_version(written)
        if self.others:
            cast_into(self.others)
        if self.params:
            with store.lock:
                self._close(len(self._copies))
                if (capture := store.capture) is not None:
                    capture.note_written(self._copies, self._weights)
                cast_done(self._copies)

    def _close(self, written: int) -> None:
        store.table.close_step(self.params, len(self.params), self._handles.ctypes.data, written)
        self._open = False

    def close(self) -> None:
        """End a step that failed: the next call casts, once, all copies of the parameters' memory."""
        if self._open:
            self._close(0)

    __del__ = close


def writable_copies(params: Sequence[Tensor]) -> WritableCopies:
    """Take the copies of parameters (parts of DTensors) that a step may write: fresh ones that no backward waits for.

    Until `mark_written` or `close`, no copy of the parameters' memory counts as fresh; so nothing is lost if the step
    fails. If the step is captured in a CUDA graph, the copies keep their addresses for as long as the weights' memory
    lives.
    """
    with store.lock:
        return WritableCopies(params)
