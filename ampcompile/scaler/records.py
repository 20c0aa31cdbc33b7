"""What the scaler remembers from step to step: of each optimizer as long as it lives, and of steps skipped in a row."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampcompile.errors import OptimizerError, warn_user
from ampcompile.kernels.planned import Marks
from ampcompile.optim.fused_step import call_without_interrupt, step_of
from ampcompile.optim.plan import any_set, gradients, parameters

LOOK_EVERY = 50  # updates between two reads of the count of skipped steps
TOO_MANY = 100  # skips in a row that are worth a warning


class SkipWatch:
    """Counts consecutive updates after overflows on the device, and now and then reads the count, a little late."""

    def __init__(self, device: torch.device) -> None:
        self.skips = torch.zeros((), dtype=torch.int32, device=device)  # the count, which `update_scale_` writes
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
            warn_user(
                f"found infinite or NaN gradients in {count} updates in a row, so no step was taken in any of them; "
                "expected a few at the start and then one now and then. A smaller loss scale doesn't help: look for "
                "the first infinite or NaN activation (ampcompile.audit names it) or lower the learning rate."
            )

    def _send(self) -> tuple[Tensor, torch.cuda.Event | None]:
        if not self.skips.is_cuda:
            return self.skips, None
        pinned = torch.empty((), dtype=torch.int32, device="cpu", pin_memory=True)
        host = pinned.copy_(self.skips, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.skips.device))
        return host, event


@dataclass
class Record:
    """The scaler's state for one optimizer."""

    optimizer: Callable[[], Any]
    workspaces: dict[torch.device, dict[str, Any]] = field(default_factory=dict)  # of the kernel that unscales
    told: set[str] = field(default_factory=set)  # reasons for the generic path
    found_infs: tuple[Tensor, ...] | None = None  # the latest step's overflow flags; None before the first

    def skipped(self) -> Tensor:
        """Return whether the latest step was skipped: 0-dim bool on the device."""
        if self.found_infs is None:
            raise OptimizerError("found no step so far, expected one: ask after scaler.step(optimizer)")
        found_inf = any_set(self.found_infs)
        if found_inf is not None:
            return found_inf.reshape(()).ne(0)
        optimizer = self.optimizer()
        return torch.zeros((), dtype=torch.bool, device=None if optimizer is None else parameters(optimizer)[0].device)


class Records:
    """A record per optimizer, by identity: optimizers needn't be hashable."""

    def __init__(self) -> None:
        self._by_id: dict[int, Record] = {}
        self.latest = Record(lambda: None)  # that of the latest step's optimizer
        self.watch: SkipWatch | None = None

    def __getitem__(self, optimizer: Any) -> Record:
        key, by_id = id(optimizer), self._by_id
        if key not in by_id or by_id[key].optimizer() is not optimizer:
            try:
                reference: Callable[[], Any] = weakref.ref(optimizer, lambda _: by_id.pop(key, None))
            except TypeError:  # a duck-typed optimizer with slots
                reference = lambda: optimizer
            by_id[key] = Record(reference)
        return by_id[key]

    def note_step(self, optimizer: Any, found_infs: tuple[Tensor, ...]) -> None:
        """Note the overflow flags of a step."""
        self.latest = self[optimizer]
        self.latest.found_infs = found_infs

    def end_iteration(self, begin: Callable[[], object] | None = None) -> None:
        """Drop clipping that waits for steps that weren't taken or, if the scaler doesn't scale, mark it as over.

        `begin`: for a scaler that scales, a C function that begins its next iteration, uninterrupted with the drop.
        """
        steps = [step for record in list(self._by_id.values()) if (step := step_of(record.optimizer())) is not None]
        if begin is not None:
            pending = [step for step in steps if step.pending is not None]
            call_without_interrupt([*(partial(setattr, step, "pending", None) for step in pending), begin])
            return
        for step in steps:
            step.end_iteration()


def note_clipped(optimizer: Any, state: dict[str, Any] | None, ready: bool) -> None:
    """Note in the iteration's state which gradients were clipped; `ready`: they hadn't been unscaled before."""
    if state is not None and (ready or "clipped" in state) and state["stage"] is OptState.UNSCALED:
        pending = getattr(step_of(optimizer), "pending", None)
        state["clipped"] = Marks(gradients(optimizer)) if pending is None else pending.marks
