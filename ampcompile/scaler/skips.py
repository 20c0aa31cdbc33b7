"""A warning after many skipped steps in a row, counted without waiting for the device."""

import warnings

import torch
from torch import Tensor

from ampcompile.errors import AmpWarning

LOOK_EVERY = 50
"""Updates between two reads of the count."""
TOO_MANY = 100
"""Skips in a row that are worth a warning."""


class SkipWatch:
    """Counts consecutive updates after overflows on the device, and now and then reads the count, a little late."""

    def __init__(self, device: torch.device) -> None:
        self.skips = torch.zeros((), dtype=torch.int32, device=device)
        """The count, which `update_scale_` writes."""
        self._updates = 0
        self._arrived: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._warned = False

    def look(self) -> None:
        """Call after each update; warns once, at most `LOOK_EVERY` updates late."""
        if self._warned or (self.skips.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self._updates += 1
        if self._updates % LOOK_EVERY == 0:
            self._arrived = self._send()
        if self._arrived is None or (self._arrived[1] is not None and not self._arrived[1].query()):
            return
        count = int(self._arrived[0].numpy())
        self._arrived = None
        if count >= TOO_MANY:
            self._warned = True
            warnings.warn(
                f"found infinite or NaN gradients in {count} updates in a row, so no step was taken in any of them; "
                "expected a few at the start and then one now and then. A smaller loss scale doesn't help: look for "
                "the first infinite or NaN activation (ampcompile.audit names it) or lower the learning rate.",
                AmpWarning,
                stacklevel=6,  # past look, update, its name in profiles and the two wrappers that keep Dynamo out
            )

    def _send(self) -> tuple[Tensor, torch.cuda.Event | None]:
        if not self.skips.is_cuda:
            return self.skips, None
        pinned = torch.empty((), dtype=torch.int32, device="cpu", pin_memory=True)
        host = pinned.copy_(self.skips, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.skips.device))
        return host, event
