"""Copies on a GPU, which works behind the host: unreported writes, several streams, captures of CUDA graphs.

The host never waits. Each call launches a comparison of samples, and what differs is cast again right there, so the
graph that runs next reads fresh copies. Only while a backward still waits for one of them must no buffer change:
then the comparison reports, and the next call that learns of it raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampcompile.errors import StaleWeightError
from ampcompile.kernels.recheck import recheck_
from ampcompile.torch_private import storages

from .memory import everything_doubted

if TYPE_CHECKING:
    from .copies import Copy

_reports: dict[torch.device, Report] = {}
_tensor: Callable[[Copy], Tensor] = attrgetter("tensor")
_launch: Callable[[Copy], Any] = attrgetter("launch")


class LastLaunch:
    """The last launch that wrote some copies, or looked at them: those on other streams come after it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.cuda.Event()
        self.record()

    def record(self) -> None:
        """It is what was launched just now."""
        self._event.record(torch.cuda.current_stream(self._device))
        self._stream = storages.current_stream(self._device)

    def wait(self) -> None:
        """Have the current stream wait for it; the host doesn't."""
        if self._stream != storages.current_stream(self._device):
            self._event.wait(torch.cuda.current_stream(self._device))


class Report:
    """A number that the device raises to that of the present generation, and the host's views of it, a call behind.

    A report ends its generation: what was launched before tells of nothing new, however late it arrives.
    """

    def __init__(self, device: torch.device) -> None:
        self.device_mark, self.repaired = torch.zeros(2, 1, dtype=torch.int32, device=device)
        self.generation = 1
        self.made = LastLaunch(device) if self.device_mark.is_cuda else None
        self._views: dict[int, tuple[Tensor, Any]] = {}  # by stream: one's copies arrive in order

    def fetch(self, stream: int) -> None:
        """Have the host see what was found by now."""
        if stream not in self._views:
            with torch.inference_mode(False):
                pinned = torch.zeros(1, dtype=torch.int32, pin_memory=torch.cuda.is_available())
            self._views[stream] = pinned, pinned.numpy()
        self._views[stream][0].copy_(self.device_mark, non_blocking=True)

    def check(self) -> None:
        """Raise if an unreported write met a backward that was still to come; the next call casts what was written."""
        if any(view[0] >= self.generation for _, view in self._views.values()):
            self.generation += 1
            everything_doubted()
            raise StaleWeightError(
                "found a weight that was rewritten where PyTorch can't see it while a backward was still to come that "
                "reads its old value: at least one call since used the old value too. Expected such writes after the "
                "backward, or announced: call ampcompile.invalidate(model) after each, or compile with "
                'options={"weights": "every_call"}'
            )


class Recheck:
    """Looks at the copies on one device that one set of weights has, for as long as none of them moves."""

    def __init__(self, device: torch.device, members: Sequence[Copy], tables: dict[Any, Any]) -> None:
        self.device, self._tables = device, tables
        self._storages = [storages.storage_key(_buffer(copy)) for copy in members]
        self._owners: Any = None
        self._workspace: dict[int, Any] = {}
        self._streams: set[int] = set()
        if device not in _reports:
            _reports[device] = Report(device)

    def look(self, members: Sequence[Copy], weights: Sequence[Tensor], cast: Collection[Copy]) -> None:
        """Before each call; `members` are the copies of `weights`, `cast` those that were written in this call."""
        report = _reports[self.device]
        report.check()
        if all(copy in cast for copy in members):
            return
        free = self._nobody_waits(members)
        tensors = list(map(_tensor, members))
        stream = storages.current_stream(self.device) if weights[0].is_cuda else 0
        launches = follow(members)
        if stream not in self._streams:
            self._streams.add(stream)
            keep_for_stream(members)
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

    def _nobody_waits(self, members: Sequence[Copy]) -> bool:
        """Whether all buffers may be written: at most a look at how many own each, while that stays the same."""
        tensors = list(map(_tensor, members))
        users = list(map(storages.tensor_users, tensors)), list(map(storages.storage_users, self._storages))
        owners = *users, list(map(sys.getrefcount, tensors))
        del tensors  # the copies' own count has no other
        if owners != self._owners:
            if any(copy.waited_for() and not copy.in_place for copy in members):
                return False
            self._owners = owners
        return True


def _buffer(copy: Copy) -> Tensor:
    assert copy.tensor is not None, "copies are packed on CPUs only"
    return copy.tensor


def keep_for_stream(copies: Iterable[Copy]) -> None:
    """Have the copies' memory wait, once nobody holds it, for what the current streams do with it until then."""
    for copy in copies:
        tensor = _buffer(copy)
        if tensor.is_cuda and (here := storages.current_stream(tensor.device)) not in copy.streams:
            copy.streams.add(here)
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def follow(copies: Iterable[Copy]) -> set[LastLaunch]:
    """Have the current streams wait for whoever wrote these copies last. Returns what they were written by."""
    launches = set(map(_launch, copies)) - {None}
    for launch in launches:
        launch.wait()
    return launches


def cast_done(copies: Sequence[Copy]) -> None:
    """Copies have just been written, each on the current stream of its device."""
    on_gpus = [copy for copy in copies if _buffer(copy).is_cuda]
    if capturing(map(_buffer, on_gpus)):
        return  # the order is part of the graph
    keep_for_stream(on_gpus)
    launches = {device: LastLaunch(device) for device in {_buffer(copy).device for copy in on_gpus}}
    for copy in on_gpus:
        copy.launch = launches[_buffer(copy).device]


def capturing(weights: Iterable[Tensor]) -> bool:
    """Whether launches now go into a CUDA graph: it has to cast at each replay, where no host looks at weights."""
    return any(weight.is_cuda for weight in weights) and torch.cuda.is_current_stream_capturing()
