"""Copies on a GPU, which works behind the host: unreported writes, several streams, captures of CUDA graphs.

The host never waits. Each call launches a comparison of samples, and what differs is cast again right there, so the
graph that runs next reads fresh copies. Only while a backward still waits for one of them must no buffer change:
then the comparison reports, and the next call that learns of it raises.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampcompile.errors import StaleWeightError
from ampcompile.kernels.recheck import recheck_
from ampcompile.torch_private import storages

if TYPE_CHECKING:
    from .copies import Copy

_reports: dict[torch.device, Report] = {}
_casts: dict[torch.device, tuple[int, torch.cuda.Event]] = {}


class Report:
    """A flag that the device sets, and the host's view of it, which may be a call behind."""

    def __init__(self, device: torch.device) -> None:
        self.device_flag = torch.zeros(1, dtype=torch.int32, device=device)
        self.host_flag = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._view = self.host_flag.numpy()

    def check(self) -> None:
        """Raise if an unreported write met a backward that was still to come."""
        if self._view[0]:
            self._view[0] = 0
            self.device_flag.zero_()
            raise StaleWeightError(
                "found a weight that was rewritten where PyTorch can't see it while a backward was still to come that "
                "reads its old value: at least one call since used the old value too. Expected such writes after the "
                "backward, or announced: call ampcompile.invalidate(model) after each, or compile with "
                'options={"weights": "every_call"}'
            )


class Recheck:
    """Looks at the copies on one device that one set of weights has."""

    def __init__(self, device: torch.device, members: Sequence[Copy]) -> None:
        self.device = device
        self._storages = [storages.storage_key(_buffer(copy)) for copy in members]
        self._owners: Any = None
        self._workspace: dict[str, Any] = {}
        self._repaired = torch.zeros(1, dtype=torch.int32, device=device)
        self._streams: set[int] = set()
        if device not in _reports:
            _reports[device] = Report(device)

    def look(self, members: Sequence[Copy], weights: Sequence[Tensor]) -> None:
        """Before each call; `members` are the copies of `weights`."""
        report = _reports[self.device]
        report.check()
        free = self._nobody_waits(members)
        tensors = list(map(_buffer, members))
        self._follow(tensors)
        if free:
            recheck_(tensors, weights, self._repaired, True, self._workspace)
        else:
            recheck_(tensors, weights, report.device_flag, False, self._workspace)
            report.host_flag.copy_(report.device_flag, non_blocking=True)

    def _nobody_waits(self, members: Sequence[Copy]) -> bool:
        """Whether all buffers may be written: at most a look at how many own each, while that stays the same."""
        owners = [
            [storages.tensor_users(_buffer(copy)) for copy in members],
            list(map(storages.storage_users, self._storages)),
            [sys.getrefcount(_buffer(copy)) for copy in members],
        ]
        if owners != self._owners:
            if not all(copy.writable() for copy in members):
                return False
            self._owners = owners
        return True

    def _follow(self, tensors: Sequence[Tensor]) -> None:
        """On another stream than that of the last cast: wait for it there, and keep the memory for this stream."""
        if self.device.type != "cuda" or self.device not in _casts:
            return
        stream, done = _casts[self.device]
        if (here := storages.current_stream(self.device)) != stream:
            done.wait(torch.cuda.current_stream(self.device))
            if here not in self._streams:
                self._streams.add(here)
                for tensor in tensors:
                    tensor.record_stream(torch.cuda.current_stream(self.device))


def _buffer(copy: Copy) -> Tensor:
    assert copy.tensor is not None, "copies are packed on CPUs only"
    return copy.tensor


def cast_done(tensors: Sequence[Tensor]) -> None:
    """Copies have just been written: remember on which stream."""
    if capturing(tensors):
        return  # the order is part of the graph
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        _casts[device] = (storages.current_stream(device), event)


def capturing(weights: Sequence[Tensor]) -> bool:
    """Whether launches now go into a CUDA graph: it has to cast at each replay, where no host looks at weights."""
    return any(weight.is_cuda for weight in weights) and torch.cuda.is_current_stream_capturing()
