"""Copies on a GPU, which runs behind the host: several streams, and captures of CUDA graphs. The host never waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ampcompile.torch_private import storages

if TYPE_CHECKING:
    from .copies import Copy


class LastLaunch:
    """The last launch that wrote some copies: launches on other streams wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))
        self._stream = storages.current_stream(device)

    def wait(self) -> None:
        """Make the current stream wait for the launch; the host doesn't wait."""
        if self._stream != storages.current_stream(self._device):
            self._event.wait(torch.cuda.current_stream(self._device))


def follow(copies: Iterable[Copy]) -> None:
    """Make the current streams wait for the last launches that wrote these copies."""
    for launch in {copy.launch for copy in copies}:
        if launch is not None:
            launch.wait()


def use_here(copies: Iterable[Copy], buffers: Iterable[Tensor]) -> None:
    """Let the current streams use these copies: they wait for the casts, and the allocator for them."""
    copies = list(copies)
    follow(copies)
    for copy, buffer in zip(copies, buffers, strict=True):
        if copy.on_gpu and (stream := storages.current_stream(buffer.device)) not in copy.streams:
            copy.streams.add(stream)
            buffer.record_stream(torch.cuda.current_stream(buffer.device))


def cast_done(copies: Sequence[Copy]) -> None:
    """Record that copies were just written, each on the current stream of its device."""
    on_gpus = [(copy, buffer) for copy in copies if copy.on_gpu and (buffer := copy.tensor) is not None]
    if on_gpus and torch.cuda.is_current_stream_capturing():
        return  # the captured graph keeps the order
    launches = {device: LastLaunch(device) for device in {buffer.device for _, buffer in on_gpus}}
    for copy, buffer in on_gpus:
        copy.launch = launches[buffer.device]
    use_here([copy for copy, _ in on_gpus], [buffer for _, buffer in on_gpus])


def capturing(weights: Iterable[Tensor]) -> bool:
    """Return True if launches go into a CUDA graph now: it must cast at each replay, as no host code checks weights."""
    return any(weight.is_cuda for weight in weights) and torch.cuda.is_current_stream_capturing()
