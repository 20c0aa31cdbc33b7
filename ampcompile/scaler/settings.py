"""The settings of a captured step's optimizers that replays follow: numbers that kernels read from a table."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ampcompile.optim.fused_step import step_of
from ampcompile.optim.plan import family_of
from ampcompile.torch_private import optimizers as private

from .surroundings import setting

NUMBERS = ("lr", "betas", "eps", "weight_decay", "momentum")


class Settings:
    """Those of all groups of our optimizers. `device`: of the graph's parameters; None without a graph.

    `names`: those that are followed, as `Surroundings` names them; `fixed`: those of torch's optimizers.
    """

    def __init__(self, optimizers: Sequence[Any], device: torch.device | None) -> None:
        self._optimizers, self._device = optimizers, device
        self._steps = [step for optimizer in optimizers if (step := step_of(optimizer)) is not None]
        self.tables = [step.settings for step in self._steps]  # which the graph reads
        self.write()
        for table in self.tables:
            table.followed = True
            table.grads.clear()

    def write(self) -> None:
        """Write, before a capture or replay, what the graph reads, where it changed."""
        if self._device is not None:
            for step in self._steps:
                step.write_settings(self._device)

    def follow(self, named: Collection[str]) -> None:
        """After the capture: let replays follow numbers that only kernels read, not those `named` in functions."""
        self.names, self.fixed = set[str](), set[str]()
        self._followed: list[tuple[dict[str, Any], str, bool]] = []  # the last: if it matters that it is 0
        for number, optimizer in enumerate(self._optimizers):
            step, decides = step_of(optimizer), family_of(optimizer).kind
            bare = step in self._steps and step.settings.followed and private.is_bare(optimizer)  # no hook may read
            for i, group in enumerate(optimizer.param_groups):
                if step is None:
                    self.fixed |= {setting(key, i, f"optimizer {number}") for key in group}
                for key in NUMBERS if bare and "param_groups" not in named else ():
                    if key in group and key not in named:
                        self.names.add(setting(key, i, f"optimizer {number}"))
                        self._followed.append((group, key, key in decides))
        self._kinds = self._kinds_now()

    def changed(self) -> str:
        """What is no number any more, or became or left 0 where that decides how a step is taken, in words."""
        if (now := self._kinds_now()) == self._kinds:
            return ""
        return " and ".join(key for (_, key, _), a, b in zip(self._followed, self._kinds, now, strict=True) if a != b)

    def _kinds_now(self) -> list[tuple[bool, bool]]:
        values = [(group[key], decides) for group, key, decides in self._followed]
        return [(is_number := _is_number(value), is_number and decides and bool(value)) for value, decides in values]


def _is_number(value: Any) -> bool:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return all(type(one) in (int, float) for one in values)
