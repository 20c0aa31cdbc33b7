"""`keep_masters`: an optimizer's steps on 16-bit parameters with float32 precision."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampcompile.errors import ScalerError
from ampcompile.torch_private import dynamo_marks, optimizers

from .clipping import apply_pending, factors, pending
from .conditions import OPTIMIZERS
from .families import gradients, parameters, return_steps
from .masters import KEEPERS, NAMES, NARROW, STATES, Masters, masters_of, require_kind, states_elsewhere
from .plan import PerDevice, Plans


@dynamo_marks.run_untraced
def keep_masters(optimizer: torch.optim.Optimizer, how: str = "remainder", *, seed: int = 0) -> MasterStep:
    """Make the steps of an optimizer of 16-bit parameters as precise as with float32 parameters.

    `optimizer`: torch's SGD, Adam or AdamW. `how`, for each parameter of 16 bits (docs/scaler.md compares them):

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
    _require_possible(optimizer, how)
    masters = MasterStep(how, _checked(seed), weakref.ref(optimizer))
    masters.instead_of = optimizers.replace_step(optimizer, masters, masters.reduce)
    masters.hooks = [
        optimizer.register_state_dict_pre_hook(return_steps),
        optimizer.register_state_dict_post_hook(masters.save_whole),
        optimizer.register_load_state_dict_pre_hook(masters.note_saved),
        optimizer.register_load_state_dict_post_hook(masters.restore_saved),
    ]
    KEEPERS.add(masters)
    return masters


@dataclass(eq=False, repr=False)
class MasterStep(Masters):
    """The step of an optimizer that keeps masters."""

    plans: Plans = field(default_factory=lambda: Plans("on float32 masters is torch's"))
    hooks: list[Any] = field(default_factory=list)
    instead_of: dict[str, Any] = field(default_factory=dict)
    """The attributes that the optimizer had itself"""
    _wrapped_by_lr_sched = True  # for schedulers: it tells them itself that it was called

    @dynamo_marks.run_untraced
    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, with the optimizer's hooks; see `torch.optim.Optimizer.step`."""
        return torch.optim.Optimizer.profile_hook_step(self.take)(self._living_optimizer(), closure)

    def _living_optimizer(self) -> Any:
        if not self.hooks:
            raise ScalerError(
                "found masters that were removed, expected those that an optimizer keeps: call keep_masters() again"
            )
        if (optimizer := self.optimizer()) is None:
            raise ScalerError(
                "found a step whose optimizer was deleted, expected one that is there: hold the optimizer, not its "
                "`step` alone"
            )
        return optimizer

    def take(self, optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step by the kernels where they can, else by torch's optimizer on float32 weights.

        It unscales gradients and skips, as torch's fused optimizers do, where a scaler set `grad_scale`, `found_inf`;
        and clips, if that waits for the step. Gradients stay as they are.
        """
        optimizer._opt_called = True  # as schedulers expect of the step that they wrap
        loss = None
        if closure is not None:
            apply_pending(optimizer)  # to the gradients before the closure's
            with torch.enable_grad():
                loss = closure()
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        plan = self.plans.of(optimizer, in_step=True)
        multipliers = dict(factors(optimizer, gradients(optimizer) if plan is None else plan.gradients))
        if scale is not None:
            for device in {param.device for param in parameters(optimizer)}:
                multipliers[device] = scale.to(device).double().reciprocal().float() * multipliers.get(device, 1)
        if plan is not None:
            plan.run(optimizer, multipliers, () if found_inf is None else (found_inf,))
        elif found_inf is None or not found_inf:
            with torch.no_grad():
                _step_by_torch(optimizer, self, multipliers)
        if (clipping := pending(optimizer)) is not None:
            clipping.over = True  # another step on these gradients clips them too, and others don't miss it
        return loss

    @dynamo_marks.run_untraced
    def remove(self) -> None:
        """Give the optimizer back its own step, with state of the parameters' types. ScalerError if that was done."""
        optimizer = self._living_optimizer()
        return_steps(optimizer)
        while self.hooks:
            self.hooks.pop().remove()
        KEEPERS.discard(self)
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
        optimizer = self.optimizer()
        return _restore, (type(optimizer), optimizer.__getstate__(), self.how, self.seed)


def _restore(kind: type[torch.optim.Optimizer], state: dict[str, Any], how: str, seed: int) -> torch.optim.Optimizer:
    optimizer = kind.__new__(kind)
    optimizer.__setstate__(state)
    keep_masters(optimizer, how, seed=seed)
    return optimizer


def _require_possible(optimizer: torch.optim.Optimizer, how: str) -> None:
    if how not in STATES:
        raise ScalerError(f"found how={how!r}; expected one of {', '.join(map(repr, STATES))}")
    if type(optimizer) not in OPTIMIZERS:
        raise ScalerError(
            f"found an optimizer of type {type(optimizer).__name__}; expected torch's SGD, Adam or AdamW, whose steps "
            "are known: keep float32 parameters for others"
        )
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


def _checked(seed: Any) -> int:
    try:
        if -(2**63) <= (number := operator.index(seed)) < 2**63:
            return number
    except TypeError:
        pass
    raise ScalerError(f"found seed={seed!r}; expected an integer of 64 bits, from -2**63 to 2**63 - 1")


def _step_by_torch(optimizer: Any, masters: Masters, multipliers: PerDevice) -> None:
    """Take a step by an optimizer of torch's on temporary float32 weights."""
    return_steps(optimizer)
    others = states_elsewhere(optimizer, masters.how)
    masters.widen_states(optimizer)
    weights: dict[Tensor, Tensor] = {}
    states: dict[Tensor, dict[str, Any]] = {}
    for number, param in enumerate(parameters(optimizer)):
        if param.grad is None:
            continue
        state = states[param] = dict(optimizer.state[param])
        weight = param.detach()
        if param.dtype in NARROW:
            masters.make(param, state, number, others[id(param)])
            weight = masters.read_weight(weight, state)
        weight.grad = param.grad.to(weight.dtype)
        if (multiplier := multipliers.get(weight.device)) is not None:
            weight.grad = weight.grad * multiplier
        weights[param] = weight
    groups = [
        {**group, "params": [weights[p] for p in group["params"] if p in weights]} for group in optimizer.param_groups
    ]
    torchs = type(optimizer)(groups)
    for param, weight in weights.items():
        torchs.state[weight] = {name: value for name, value in states[param].items() if name not in NAMES}
    torchs.step()
    for param, weight in weights.items():
        state = optimizer.state[param]
        state.update(states[param])
        state.update(torchs.state[weight])
        if param.dtype in NARROW:
            if masters.how == "stochastic":
                state["rounding_key"][2] += 1
            masters.write_weight(param, state, weight)
