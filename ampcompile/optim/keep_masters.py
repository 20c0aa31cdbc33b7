"""`keep_masters`: an optimizer's steps on 16-bit parameters with float32 precision."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampcompile.errors import ScalerError
from ampcompile.torch_private import marks, optimizers

from .families import move_step_counts_to_cpu, parameters
from .fused_step import step_of
from .masters import KEEPERS, NAMES, NARROW, STATES, masters_of, require_kind, states_elsewhere


@marks.run_untraced
def keep_masters(optimizer: torch.optim.Optimizer, how: str = "remainder", *, seed: int = 0) -> MasterStep:
    """Make the steps of an optimizer of 16-bit parameters as precise as with float32 parameters.

    `optimizer`: torch's SGD, Adam or AdamW. `how`, for each parameter of 16 bits (docs/optimizer.md compares them):

    - `"remainder"`: int16 beside each bfloat16, which together are a float32 master weight.
    - `"float32"`: a master beside each bfloat16 or float16.
    - `"stochastic"`: nothing beside bfloat16, which is rounded up or down at random, by `seed`, parameter and step.

    Adam's moments and momentum are float32. All of it is in `optimizer.state`, and so in its `state_dict`. The returned
    object's `remove()` gives the optimizer back its own step. Two optimizers of one parameter have one master, kept in
    one way. `seed`: 64 bits, signed. Raises ScalerError for other optimizers, parameters and seeds.

    >>> model = model.to(torch.bfloat16)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> masters = ampcompile.keep_masters(optimizer)
    >>> model(x.bfloat16()).square().mean().backward()
    >>> optimizer.step()
    """
    if type(optimizer) not in optimizers.TORCHS:
        raise ScalerError(
            f"found an optimizer of type {type(optimizer).__name__}; expected torch's SGD, Adam or AdamW, whose steps "
            "are known: keep float32 parameters for others; those of ampcompile.optim take masters= when they are made"
        )
    require_possible(optimizer, how)
    return MasterStep(optimizer, how, checked(seed))


class MasterStep:
    """The step of an optimizer of torch's that keeps masters."""

    _wrapped_by_lr_sched = True  # for schedulers: it tells them itself that it was called

    def __init__(self, optimizer: torch.optim.Optimizer, how: str, seed: int) -> None:
        self._ampcompile_step = step = step_of(optimizer)
        self.hooks = step.keep_masters(how, seed)
        self.masters: Any = step.masters
        self.instead_of = optimizers.replace_step(optimizer, self, self.reduce, step)
        """The attributes that the optimizer had itself"""

    @marks.run_untraced
    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, with the optimizer's hooks; see `torch.optim.Optimizer.step`."""
        self.require_kept()
        self._ampcompile_step.living_optimizer()._opt_called = True  # as schedulers expect of the step that they wrap
        return self._ampcompile_step.step(closure)

    def require_kept(self) -> None:
        """Raise ScalerError if they were removed."""
        if not self.hooks:
            raise ScalerError(
                "found masters that were removed, expected those that an optimizer keeps: call keep_masters() again"
            )

    @marks.run_untraced
    def remove(self) -> None:
        """Give the optimizer back its own step, with state of the parameters' types. ScalerError if that was done."""
        self.require_kept()
        optimizer = self._ampcompile_step.living_optimizer()
        move_step_counts_to_cpu(optimizer)
        while self.hooks:
            self.hooks.pop().remove()
        KEEPERS.discard(self.masters)
        self._ampcompile_step.masters = None
        optimizers.restore_step(optimizer, self.instead_of)
        for param in parameters(optimizer):
            if param.dtype in NARROW:
                for name, value in list((state := optimizer.state[param]).items()):
                    if name in NAMES:
                        del state[name]
                    elif isinstance(value, Tensor) and name != "step":
                        state[name] = value.to(param.dtype)

    def reduce(self, _: object) -> tuple[Any, ...]:
        """Copy or pickle the optimizer with its step, which torch leaves out."""
        optimizer, masters = self._ampcompile_step.living_optimizer(), self.masters
        return _restore, (type(optimizer), optimizer.__getstate__(), masters.how, masters.seed)


def _restore(kind: type[torch.optim.Optimizer], state: dict[str, Any], how: str, seed: int) -> torch.optim.Optimizer:
    optimizer = kind.__new__(kind)
    optimizer.__setstate__(state)
    keep_masters(optimizer, how, seed=seed)
    return optimizer


def require_possible(optimizer: torch.optim.Optimizer, how: str) -> None:
    """Raise unless an optimizer can keep masters so."""
    if how not in STATES:
        raise ScalerError(f"found how={how!r}; expected one of {', '.join(map(repr, STATES))}")
    if masters_of(optimizer) is not None:
        raise ScalerError("found an optimizer that keeps masters already; expected one call of keep_masters() for each")
    if any(group["differentiable"] for group in optimizer.param_groups):
        raise ScalerError("found differentiable=True; expected an optimizer without it: masters have no gradients")
    narrow = [param for param in parameters(optimizer) if param.dtype in NARROW]
    if not narrow:
        raise ScalerError("found no 16-bit parameter; expected some: float32 parameters need no masters")
    for param in narrow:
        require_kind(param, how)
    states_elsewhere(optimizer, how)


def checked(seed: Any) -> int:
    """Return the seed; raise unless it is an integer of 64 bits."""
    try:
        if -(2**63) <= (number := operator.index(seed)) < 2**63:
            return number
    except TypeError:
        pass
    raise ScalerError(f"found seed={seed!r}; expected an integer of 64 bits, from -2**63 to 2**63 - 1")
