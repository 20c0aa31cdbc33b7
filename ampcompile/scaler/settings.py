"""The settings of a captured step's optimizers: replays follow numbers of ours, other changes lead to a new capture."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompile.errors import CaptureError
from ampcompile.optim.fused_step import step_of
from ampcompile.optim.plan import family_of
from ampcompile.torch_private import optimizers as private

NUMBERS = ("lr", "betas", "eps", "weight_decay", "momentum")  # that kernels read from a table


class Settings:
    """The settings of all groups at a capture, without what else schedulers keep there.

    `device`: of the graph's parameters; None without a graph.
    """

    def __init__(self, optimizers: Sequence[Any], device: torch.device | None) -> None:
        self._optimizers, self._device = optimizers, device
        self._values = self._now()
        self._held = [value for _, group in self._groups() for value in group.values()]  # no other gets the id of one
        self._followed: set[tuple[int, str]] = set()
        self._steps = [step for optimizer in optimizers if (step := step_of(optimizer)) is not None]
        self.tables = [step.settings for step in self._steps]  # which the graph reads
        self.write()
        for table in self.tables:
            table.followed = True
            table.grads.clear()

    def write(self) -> None:
        """Write, before a capture or replay, what the graph reads."""
        if self._device is not None:
            for step in self._steps:
                if step.settings.latest is not self._values:
                    step.write_settings(self._device)
                    step.settings.latest = self._values

    def follow(self, named: Collection[str]) -> None:
        """After the capture: let replays follow numbers that only kernels read, not those `named` in functions."""
        names = NUMBERS if "param_groups" not in named else ()
        for i, (optimizer, _) in enumerate(self._groups()):
            step = step_of(optimizer)
            if step in self._steps and step.settings.followed and private.is_bare(optimizer):  # no hook may read
                self._followed |= {(i, name) for name in names if name not in named}

    def changed(self) -> str:
        """What changed, without what follows, in words; CaptureError if it is of an optimizer of torch's."""
        if (now := self._now()) == self._values:
            return ""
        changed = [name for name in self._differing(now) if not self._follows(name, now)]
        if not changed:
            self._values = now
            return ""
        owners = [optimizer for optimizer, _ in self._groups()]
        if any(step_of(owners[i]) is None for i, _ in changed if i < len(owners)):
            raise CaptureError(
                f"found settings of an optimizer that changed since the capture, {self._words(changed, now)}, "
                "expected the same, since a graph keeps numbers: make it a tensor on the GPU and write to that "
                "(lr=torch.tensor(1e-3, device='cuda'), capturable=True or fused=True), take an optimizer of "
                "ampcompile.optim, or call forget()."
            )
        return f"{' and '.join(sorted({name for _, name in changed}))} of an optimizer"

    def require_same(self) -> None:
        """Raise for those that the captured step has changed."""
        if differing := self._differing(now := self._now()):
            raise CaptureError(
                f"found settings of an optimizer that change within the step, {self._words(differing, now)}, "
                "expected the same, since a replay runs no Python: call the scheduler, or what else sets them, between "
                "the calls of the captured step."
            )

    def _groups(self) -> list[tuple[Any, dict[str, Any]]]:
        return [(optimizer, group) for optimizer in self._optimizers for group in optimizer.param_groups]

    def _now(self) -> dict[tuple[int, str], Any]:
        """The settings by group and name, of tensors what they are known by."""
        return {
            (i, name): ("a tensor", id(value)) if isinstance(value, Tensor) else value
            for i, (optimizer, group) in enumerate(self._groups())
            for name, value in group.items()
            if name != "params" and name in optimizer.defaults
        }

    def _differing(self, now: dict[tuple[int, str], Any]) -> list[tuple[int, str]]:
        return [name for name in {**self._values, **now} if self._values.get(name) != now.get(name)]

    def _follows(self, name: tuple[int, str], now: dict[tuple[int, str], Any]) -> bool:
        """Return True for a number that stays one, and stays 0 or not where that decides how a step is taken."""
        if name not in self._followed or name not in now:
            return False
        former, value, (optimizer, _) = self._values[name], now[name], self._groups()[name[0]]
        decides = name[1] in family_of(optimizer).kind
        return _are_numbers(former) and _are_numbers(value) and not (decides and bool(former) != bool(value))

    def _words(self, names: list[tuple[int, str]], now: dict[tuple[int, str], Any]) -> str:
        return ", ".join(f"{name[1]}={now.get(name)} for {self._values.get(name)}" for name in names)


def _are_numbers(value: Any) -> bool:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in values)
