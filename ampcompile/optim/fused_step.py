"""The step of one optimizer, with or without a scaler: by the kernels where they can, else by torch's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ampcompile.errors import ScalerError
from ampcompile.torch_private import optimizers
from ampcompile.weights import reports

from .clipping import (
    apply_pending,
    clip_in_step,
    factors,
    multiply,
    pending,
    require_one_iteration,
    require_unscaled_clipping,
)
from .families import gradients, parameters, return_steps
from .masters import KEEPERS, NAMES, NARROW, Masters, states_elsewhere
from .plan import PerDevice, Plans


class FusedStep:
    """The step of an optimizer, which has it as `_ampcompile_step`: what `step()` of our classes and masters call."""

    running = False
    """True in the step, with its hooks"""

    def __init__(self, optimizer: torch.optim.Optimizer, how: str | None = None, seed: int = 0) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.masters: Masters | None = None
        self.plans = Plans("is torch's own" if how is None else "on float32 masters is torch's")
        self.hooks: list[Any] = [optimizer.register_state_dict_pre_hook(return_steps)]
        if how is not None:
            self.masters = masters = Masters(how, seed, self.optimizer)
            KEEPERS.add(masters)
            self.hooks += [
                optimizer.register_state_dict_post_hook(masters.save_whole),
                optimizer.register_load_state_dict_pre_hook(masters.note_saved),
                optimizer.register_load_state_dict_post_hook(masters.restore_saved),
            ]

    def living_optimizer(self) -> Any:
        """Return the optimizer itself, also for a wrapper of it; ScalerError if it is gone."""
        if (optimizer := self.optimizer()) is None:
            raise ScalerError(
                "found a step whose optimizer was deleted, expected one that is there: hold the optimizer, not its "
                "`step` alone"
            )
        return optimizer

    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, with the optimizer's hooks; see `torch.optim.Optimizer.step`."""
        optimizer = self.living_optimizer()
        # A user's hook may write anything, and so may a step that calls this one: then as torch's steps are reported.
        tells = optimizers.foreign_hook(optimizer) is None and not reports.in_step(optimizer)
        self.running = True
        try:
            with reports.telling(optimizer, tells):
                return _take_with_hooks(optimizer, closure)
        finally:
            self.running = False

    def take(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        """Take a step by the kernels where they can, else by torch's optimizer, with masters on float32 weights.

        It unscales gradients and skips, as torch's fused optimizers do, where a scaler set `grad_scale`, `found_inf`;
        and clips, if that waits for the step. Where the kernels can, or masters are kept, gradients stay as they are.
        """
        loss = None
        if closure is not None:
            apply_pending(optimizer)  # to the gradients before the closure's
            with torch.enable_grad():
                loss = closure()
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if scale is not None:
            require_unscaled_clipping(optimizer)
        plan = self.plans.of(optimizer, in_step=True)
        multipliers = dict(factors(optimizer, gradients(optimizer) if plan is None else plan.gradients))
        if scale is not None:
            for device in {param.device for param in parameters(optimizer)}:
                multipliers[device] = scale.to(device).double().reciprocal().float() * multipliers.get(device, 1)
        if plan is not None:
            plan.run(optimizer, multipliers, () if found_inf is None else (found_inf,))
        elif found_inf is None or not found_inf:
            _step_by_torch(optimizer, self.masters, multipliers)
        if (clipping := pending(optimizer)) is not None:
            clipping.over = True  # another step on these gradients clips them too, and others don't miss it
        return loss

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
    ) -> Tensor:
        """Clip in the next step where the kernels can and nobody wraps it, else at once by torch's function."""
        optimizer = self.living_optimizer()
        require_one_iteration("clip_grad_norm_", optimizer, None)
        if float(norm_type) == 2 and optimizers.foreign_step(optimizer) is None:
            plan = self.plans.of(optimizer, only_grads=True, in_step=True)
            if plan is not None:
                norm = clip_in_step(optimizer, plan, None, None, float(max_norm), error_if_nonfinite)
                if (clipping := pending(optimizer)) is not None:
                    clipping.by_optimizer = True
                return norm
        apply_pending(optimizer)
        return nn.utils.clip_grad_norm_(parameters(optimizer), max_norm, norm_type, error_if_nonfinite, foreach)


@torch.optim.Optimizer.profile_hook_step
def _take_with_hooks(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
    return optimizer._ampcompile_step.take(optimizer, closure)


def _step_by_torch(optimizer: Any, masters: Masters | None, multipliers: PerDevice) -> None:
    return_steps(optimizer)
    if masters is not None:
        with torch.no_grad():
            _step_on_masters(optimizer, masters, multipliers)
        return
    multiply(optimizer, multipliers)
    set_by_scaler = {name: vars(optimizer).pop(name) for name in ("grad_scale", "found_inf") if name in vars(optimizer)}
    try:
        with reports.untold_step(optimizer):
            optimizers.bare_step(optimizer)
    finally:
        vars(optimizer).update(set_by_scaler)


def _step_on_masters(optimizer: Any, masters: Masters, multipliers: PerDevice) -> None:
    """Take a step by an optimizer of torch's on temporary float32 weights."""
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
    torchs = optimizers.torchs_class(optimizer)(groups)
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
