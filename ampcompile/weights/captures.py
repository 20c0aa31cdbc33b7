"""Copies of weights, and memory, that the CUDA graph of a whole step reads and writes: its capture shows which.

In the capture the host marks, casts and hands out copies as in an eager step, in the order in which the graph will run.
So the casts that the graph contains suffice for each replay that begins as the capture did: with all copies fresh.
"""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ampcompile.errors import CaptureError
from ampcompile.kernels import tables
from ampcompile.torch_private import dispatcher, storages

from . import table
from .binding import Binding, CopySet
from .copies import Copy, LastLaunch, cast_into, on_rows
from .spec import CopySpec
from .store import mark_unproven, store

_turns = threading.RLock()  # held by the one step that is captured, or called for the last time before


class CapturedCopies:
    """The copies that a captured step reads and writes, which stay in place, and the memory that it writes."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._device, self._params = params[0].device, params
        self._kept = table.load() is not None  # False where each call casts
        # Of the last call before the capture: its graphs, with the weights among their inputs; and all inputs, by id.
        # Inputs that the capture has, too, must stay where they are.
        self._reads: list[tuple[Binding, tuple[Any, ...]]] = []
        self._lasting: dict[int, weakref.ref[Tensor]] = {}
        self._sets: set[CopySet] = set()  # whose copies were made fresh before the capture
        self._stream: int | None = None  # of the capture, or the call before it, whichever is latest
        self._thread = 0  # of the same
        self._captures = False  # while it is the capture
        self.inputs_read: set[int] = set()  # ids of all inputs of graphs in the capture
        self._weights: dict[Copy, Tensor] = {}  # what the graph reads or writes, and of which weight it is a copy
        self._fixed: dict[int, Tensor] = {}  # what else may not move, by id
        self.in_place: Any = lambda: True
        """Returns False if a tensor isn't where the graph reads it, or was frozen or thawed"""
        self.hold: Any = lambda tensors: None
        """Notes other tensors that may not move: those that code without a graph of ours reads"""
        self.make_ready: Any = lambda: None
        """Casts what became stale, before a replay"""
        self.note_replayed: Any = lambda: None
        """Marks all that a replay writes, and as fresh what it leaves fresh"""

    def make_fresh(self) -> None:
        """Make fresh what graphs have read, right before the capture: buffers made in it lie in the graph's memory."""
        for binding, inputs in self._reads:
            if (copy_set := binding.keep_in_place(inputs)) is not None:
                self._sets.add(copy_set)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """What is launched meanwhile, on the current stream, goes into the graph."""
        with self.watched():
            self._captures, self.inputs_read = True, set()
            try:
                if self._kept:
                    store.table.begin_capture()
                yield
                if self._kept:
                    self._end()
            finally:
                self._captures = False
                if self._kept:
                    store.table.end_capture()

    def forget(self) -> None:
        """Let no copy count as fresh: the capture failed, so the host has noted a step that never ran."""
        self._weights, self._fixed = {}, {}
        with store.lock:
            mark_unproven(list(store.keys))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note which graphs read copies of which weights meanwhile."""
        with _turns:
            if store.capture is not None:
                raise CaptureError(
                    "found a captured step within another one, expected one that takes the whole step: call the inner "
                    "step's function itself."
                )
            self._stream, self._thread = tables.stream(self._device), threading.get_ident()
            store.capture = self
            try:
                yield
            finally:
                store.capture = None

    def read(self, binding: Binding, inputs: tuple[Any, ...]) -> list[Tensor] | None:
        """The copies that a graph reads in the capture, in place, cast in it if need be; None: as without a capture."""
        if not self._is_here():
            return None
        if not self._captures:
            self._lasting |= {id(tensor): weakref.ref(tensor) for tensor in inputs if isinstance(tensor, Tensor)}
            self._reads.append((binding, binding.only_weights(inputs)))
            return None
        self.inputs_read.update(map(id, inputs))
        self._fixed |= {id(tensor): tensor for tensor in inputs if self._lasts(tensor)}
        copy_set = binding.set_of(inputs)
        if copy_set is None or copy_set not in self._sets:
            return None
        weights = {copy: inputs[slot] for copy, slot in zip(copy_set.copies, copy_set.slots, strict=True)}
        with _undisturbed():
            stale = self._stale(list(weights))
            if any(status & table.Status.UNWRITABLE for status in stale.values()):
                return None  # a backward that is still to come holds what would be overwritten
            self._cast(list(stale), weights)
            self._take(weights)
            buffers: list[Tensor] = store.table.buffers_of(*copy_set.rows[:2])
            return buffers

    def note_written(self, copies: Sequence[Copy], weights: Sequence[Tensor]) -> None:
        """Note that a step has written copies with their weights."""
        if self._captures and self._is_here():
            on_rows(store.table.note_recorded, copies)
            self._take(dict(zip(copies, weights, strict=True)))

    def _is_here(self) -> bool:
        """False for other threads, and for streams beside that of the capture, for which no cast would wait.

        On a GPU a backward runs in a thread of its own, on the forward's stream.
        """
        on_gpu = self._device.type == "cuda"
        return tables.stream(self._device) == self._stream and (on_gpu or threading.get_ident() == self._thread)

    def _lasts(self, tensor: Any) -> bool:
        known = self._lasting.get(id(tensor))
        return known is not None and known() is tensor

    def _take(self, weights: dict[Copy, Tensor]) -> None:
        self._weights |= weights
        store.captured.update(weights)
        for copy in weights:
            copy.keep_in_place()

    def _stale(self, copies: Collection[Copy]) -> dict[Copy, int]:
        """Copies that aren't surely fresh at this place of the graph, with their statuses."""
        statuses = np.zeros(len(copies), np.int64)
        on_rows(store.table.captured_statuses, copies, statuses.ctypes.data)
        return {copy: status for copy, status in zip(copies, statuses.tolist(), strict=True) if status}

    def _cast(self, copies: Sequence[Copy], weights: dict[Copy, Tensor]) -> None:
        if copies:
            on_rows(store.table.note_begun, copies)
            cast_into([(copy.form, copy.tensor, storages.alias(weights[copy])) for copy in copies])
            on_rows(store.table.note_made, copies)
            on_rows(store.table.note_recorded, copies)

    def _end(self) -> None:
        """Cast what was written after the last read, and keep what replays need to know."""
        with _undisturbed():
            self._cast(list(self._stale(self._weights)), self._weights)
            count, keys = 1, table.array([])
            while count > len(keys):
                keys, surely = np.zeros((2, count + len(store.keys)), np.int64)
                count = store.table.note_written(len(keys), keys.ctypes.data, surely.ctypes.data)
            copies = list(self._weights)
            question = _Question(copies, [*self._weights.values(), *self._fixed.values(), *self._params])
            self.in_place, self.make_ready, self.hold = question.in_place, question, question.hold
            rewritten = [copy for copy in copies if copy.key in keys[:count]]
            self.note_replayed = _Marks(self._device, rewritten, keys[:count], surely)
        self._weights, self._fixed, self._lasting, self._sets = {}, {}, {}, set()
        self._reads.clear()


class _Question:
    """Before each replay: is all where it was, and are the copies fresh?"""

    def __init__(self, copies: Sequence[Copy], tensors: Sequence[Tensor]) -> None:
        self._binding = Binding([CopySpec(i, copy.form) for i, copy in enumerate(copies)], in_place=True)
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._any = bool(copies)
        self.hold(())

    def hold(self, held: Sequence[Tensor]) -> None:
        self._held: tuple[Tensor, ...] = tuple(held)
        self._places = np.zeros(len(self._tensors) + len(held), np.int64)
        self._rows = len(self._places), self._places.ctypes.data
        store.table.note_places(*self._rows, self._found())

    def _found(self) -> tuple[Any, ...]:
        return *map(weakref.ref.__call__, self._tensors), *self._held

    def in_place(self) -> bool:
        return bool(store.table.are_at(*self._rows, self._found()))

    def __call__(self) -> None:
        if self._any:
            self._binding.copies(self._found())


class _Marks:
    """After each replay: mark the memory that it wrote, and the copies that it left fresh."""

    def __init__(self, device: torch.device, copies: Sequence[Copy], keys: np.ndarray, surely: np.ndarray) -> None:
        self._device, self._copies, self._arrays = device, copies, (keys.copy(), surely.copy())
        self._handles = table.array([copy.handle for copy in copies])
        self._since = store.table.now()
        self._copies_row = len(copies), self._handles.ctypes.data
        self._row = len(keys), *(array.ctypes.data for array in self._arrays), self._since, *self._copies_row

    def __call__(self) -> None:
        with store.lock:
            store.table.note_replayed(*self._row)
            if self._device.type == "cuda":
                launch = LastLaunch(self._device)
                deque(map(setattr, self._copies, repeat("launch"), repeat(launch)), 0)
                store.table.note_launch(*self._copies_row, launch.stream)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad(), dispatcher.without_modes(), store.lock:
        yield
