"""The streams of a GPU, played on the CPU: what is launched runs later, in whatever order the events allow."""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ampcompile.torch_private import storages
from ampcompile.weights import copies
from ampcompile.weights.spec import Form
from ampcompile.weights.table import Places

Launch = Callable[[], object]


class Streams:
    """Numbered streams. Their queues hold addresses, no tensors, as a GPU's do."""

    def __init__(self) -> None:
        self.here = 1
        self.captured: list[Launch] | None = None  # launches of the CUDA graph that is being captured
        self.kept: dict[int, set[int]] = {}  # by address of memory: the streams it waits for
        self._queues: dict[int, deque[Launch]] = {}
        self._passed: set[object] = set()

    @contextlib.contextmanager
    def use(self, stream: int) -> Iterator[None]:
        """Launch on this stream."""
        before, self.here = self.here, stream
        yield
        self.here = before

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[Launch]]:
        """Launch into a CUDA graph; gives what a replay launches."""
        self.captured = launches = []
        yield launches
        self.captured = None

    def launch(self, act: Launch) -> None:
        """What begins once all is done that was launched on this stream. An act that returns False waits on."""
        if self.captured is not None:
            self.captured.append(act)
        else:
            self._queues.setdefault(self.here, deque()).append(act)

    def step(self, stream: int) -> bool:
        """Run what is next on a stream, if it can begin."""
        queue = self._queues.get(stream)
        if not queue or queue[0]() is False:
            return False
        queue.popleft()
        return True

    def finish(self, *first: int) -> None:
        """Run everything, the streams named first as far as they get."""
        while any(self._queues.values()):
            if not any(self.step(stream) for stream in (*first, *self._queues)):
                raise AssertionError("streams wait for one another")

    def event(self) -> Any:
        """Stands for a `torch.cuda.Event`."""
        streams = self

        class Event:
            mark: object = None

            def record(self, stream: int) -> None:
                assert streams.captured is None, "CUDA allows no event between a capture and the outside"
                mark = self.mark = object()
                with streams.use(stream):
                    streams.launch(lambda: streams._passed.add(mark))

            def wait(self, stream: int) -> None:
                assert streams.captured is None, "CUDA allows no event between a capture and the outside"
                mark = self.mark
                with streams.use(stream):
                    streams.launch(lambda: mark in streams._passed)

        return Event()


def words(address: int, count: int, kind: Any) -> np.ndarray:
    """Memory as an array that holds nothing."""
    return np.frombuffer((ctypes.c_char * (count * np.dtype(kind).itemsize)).from_address(address), kind)


def rounded(weight: int, count: int) -> np.ndarray:
    """float32 memory in bfloat16, as uint16."""
    return torch.from_numpy(words(weight, count, np.float32).copy()).bfloat16().view(torch.int16).numpy()


class Kernels:
    """Stand for those of `kernels`: launched, not run, by tables that have to arrive first."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def table(self, tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> list[tuple]:
        """Where all lie; arrived once it holds something."""
        rows = [(w.data_ptr(), c.data_ptr(), w.numel()) for w, c in zip(weights, tensors, strict=True)]
        found: list[tuple] = []
        self.streams.launch(lambda: found.extend(rows))
        return found

    def cast_many_(self, tensors: list[Tensor], weights: list[Tensor]) -> None:
        if not tensors:
            return
        table = self.table(tensors, weights)

        def run() -> None:
            assert table, "the table is still on its way"
            for weight, copy, count in table:
                words(copy, count, np.int16)[:] = rounded(weight, count)

        self.streams.launch(run)
        torch.autograd.graph.increment_version(tensors)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """CPU tensors treated as a GPU's, whose memory holds NaN until a cast has run."""
    played = Streams()
    kernels = Kernels(played)

    def keep(tensor: Tensor, stream: int) -> None:
        played.kept.setdefault(tensor.data_ptr(), set()).add(stream)

    def empty_like(form: Form, weight: Tensor) -> Tensor:
        return torch.full_like(weight, torch.nan, dtype=form.dtype)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "record_stream", keep)
    monkeypatch.setattr(torch.cuda, "Event", played.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: played.here)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: played.captured is not None)
    monkeypatch.setattr(storages, "current_stream", lambda device: played.here)
    monkeypatch.setattr(copies, "places", lambda weight: Places(np.empty(0, np.int64), 4))
    monkeypatch.setattr(Form, "empty_like", empty_like)
    monkeypatch.setattr(copies, "cast_many_", kernels.cast_many_)
    return played
