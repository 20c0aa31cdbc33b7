"""Copies on a GPU, which runs behind the host: unreported writes, several streams, captures of CUDA graphs.

The host never waits. Each call launches a kernel that compares samples of weights and copies, and casts again what
differs, so the graph that runs next reads fresh copies. While a pending backward saved one of the copies, no buffer may
change: then the kernel only reports, and the next call that sees the report raises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampcompile.errors import StaleWeightError
from ampcompile.kernels.recheck import recheck_
from ampcompile.torch_private import storages

from .store import store

if TYPE_CHECKING:
    from .copies import Copy

_tensor: Callable[[Copy], Tensor] = attrgetter("tensor")
_launch: Callable[[Copy], Any] = attrgetter("launch")


class LastLaunch:
    """The last launch that wrote or compared some copies: launches on other streams wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.cuda.Event()
        self.record()

    def record(self) -> None:
        """Record the current stream's latest launch."""
        self._event.record(torch.cuda.current_stream(self._device))
        self._stream = storages.current_stream(self._device)

    def wait(self) -> None:
        """Make the current stream wait for the launch; the host doesn't wait."""
        if self._stream != storages.current_stream(self._device):
            self._event.wait(torch.cuda.current_stream(self._device))


class Report:
    """A mark that the device raises to the number of the current generation, and the host's copies of it, a call late.

    A report ends its generation: results of launches from older generations are ignored, however late they arrive.
    """

    def __init__(self, device: torch.device) -> None:
        self.device_mark, self.repaired = torch.zeros(2, 1, dtype=torch.int32, device=device)
        self.generation = 1
        self.made = LastLaunch(device) if self.device_mark.is_cuda else None
        self._views: dict[int, tuple[Tensor, Any]] = {}  # by stream: copies on one stream arrive in order

    def fetch(self, stream: int) -> None:
        """Copy the device's mark to the host, without waiting."""
        if stream not in self._views:
            with torch.inference_mode(False):
                pinned = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=torch.cuda.is_available())
            self._views[stream] = pinned, pinned.numpy()
        self._views[stream][0].copy_(self.device_mark, non_blocking=True)

    def check(self) -> None:
        """Raise if an unreported write met a pending backward; the next call casts the weights again."""
        if any(view[0] >= self.generation for _, view in self._views.values()):
            self.generation += 1
            store.doubt_all()
            raise StaleWeightError(
                "found a weight that was rewritten where PyTorch can't see it while a backward was still to come that "
                "reads its old value: at least one call since used the old value too. Expected such writes after the "
                "backward, or announced: call ampcompile.invalidate(model) after each, or compile with "
                'options={"weights": "every_call"}'
            )


class Recheck:
    """Compares the copies of one set on one device with their weights, for as long as no buffer is replaced.

    `places`: the indices of the weights of `members`. `idle`: tells if all their buffers may be written.
    """

    def __init__(
        self, places: Sequence[int], members: Sequence[Copy], idle: Callable[[], bool], tables: dict[Any, Any]
    ) -> None:
        self._places, self._members, self._idle, self._tables = places, members, idle, tables
        device = self.device = _buffer(members[0]).device
        self._workspace: dict[int, Any] = {}
        self._streams: set[int] = set()
        if device not in store.reports:
            store.reports[device] = Report(device)

    def look(self, weights: Sequence[Tensor], cast: Collection[Copy]) -> None:
        """Compare before a call; `cast`: copies that were cast in this call."""
        report = store.reports[self.device]
        report.check()
        if all(copy in cast for copy in self._members):
            return
        free = self._idle()
        weights = [weights[i] for i in self._places]
        tensors = list(map(_tensor, self._members))
        stream = storages.current_stream(self.device) if weights[0].is_cuda else 0
        launches = follow(self._members)
        if stream not in self._streams:
            self._streams.add(stream)
            keep_for_stream(self._members)
            if report.made is not None:
                report.made.wait()
        if free:
            recheck_(tensors, weights, report.repaired, 1, True, self._workspace, self._tables)
        else:
            mark = report.generation
            recheck_(tensors, weights, report.device_mark, mark, False, self._workspace, self._tables)
            report.fetch(stream)
        for launch in launches:
            launch.record()


def _buffer(copy: Copy) -> Tensor:
    assert copy.tensor is not None, "copies are packed on CPUs only"
    return copy.tensor


def keep_for_stream(copies: Iterable[Copy]) -> None:
    """Make the allocator reuse the copies' memory only after the current streams' work on it."""
    for device, on_device in _by_gpu(copies).items():
        _keep_for_stream(on_device, device)


def _keep_for_stream(copies: Iterable[Copy], device: torch.device) -> None:
    stream = storages.current_stream(device)
    for copy in copies:
        if stream not in copy.streams:
            copy.streams.add(stream)
            _buffer(copy).record_stream(torch.cuda.current_stream(device))


def follow(copies: Iterable[Copy]) -> set[LastLaunch]:
    """Make the current streams wait for the last launches that used these copies, and return those launches."""
    launches = set(map(_launch, copies)) - {None}
    for launch in launches:
        launch.wait()
    return launches


def cast_done(copies: Sequence[Copy]) -> None:
    """Record that copies were just written, each on the current stream of its device."""
    on_gpus = _by_gpu(copies)
    if on_gpus and torch.cuda.is_current_stream_capturing():
        return  # the captured graph keeps the order
    for device, on_device in on_gpus.items():
        _keep_for_stream(on_device, device)
        launch = LastLaunch(device)
        for copy in on_device:
            copy.launch = launch


def _by_gpu(copies: Iterable[Copy]) -> dict[torch.device, list[Copy]]:
    found: dict[torch.device, list[Copy]] = {}
    for copy in copies:
        if (tensor := _buffer(copy)).is_cuda:
            found.setdefault(tensor.device, []).append(copy)
    return found


def capturing(weights: Iterable[Tensor]) -> bool:
    """Return True if launches go into a CUDA graph now: it must cast at each replay, as no host code checks weights."""
    return any(weight.is_cuda for weight in weights) and torch.cuda.is_current_stream_capturing()
