"""`GradScaler`: torch's, with a step of a few fused kernels that never waits for the host."""

import logging
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from ampcompile.errors import CaptureError, OptimizerError, warn_user
from ampcompile.kernels import tables
from ampcompile.kernels.update_scale import update_scale_
from ampcompile.optim import adopt
from ampcompile.optim.fused_step import FusedStep, step_of
from ampcompile.optim.plan import amp_aware, gradients, obstacle_of, on_device, parameters
from ampcompile.torch_private import dispatcher, marks, optimizers, storages
from ampcompile.weights.store import store

from .generic import are_plain, clip_values, generic_step, hand_over, unscale_grads
from .records import Records, SkipWatch, note_clipped

log = logging.getLogger(__name__)


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose `step`, for our SGD, Adam and AdamW, is a few fused kernels.

    torch's become ours with their first step: their class is exchanged. Takes the same arguments, and keeps the scale
    within `min_scale` (2^-24) and `max_scale` (2^64). docs/scaler.md lists the differences from torch's. Raises
    OptimizerError for a device that torch doesn't know, an `init_scale` that is not above 0, and bounds in the wrong
    order; warns of an `init_scale` beyond the bounds, and begins at the bound.

    >>> optimizer, scaler = torch.optim.AdamW(model.parameters()), ampcompile.GradScaler("cpu")
    >>> scaler.scale(compiled(x).square().mean()).backward()
    >>> norm = scaler.clip_grad_norm_(optimizer, 1.0)
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> scaler.last_step_skipped
    tensor(False)
    """

    _min_scale = 2.0**-24  # where the state is that of torch's own scaler, which has no bounds
    _max_scale = 2.0**64

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = _min_scale,
        max_scale: float = _max_scale,
    ) -> None:
        if enabled:
            try:
                torch.device(device)
            except (RuntimeError, TypeError) as error:
                raise OptimizerError(
                    f"found device {device!r}; expected a type of devices that torch knows, such as 'cuda' or 'cpu'"
                ) from error
            if not 0 < init_scale < math.inf:
                raise OptimizerError(f"found init_scale={init_scale!r}; expected a number above 0, such as 2.0**16")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        if not 0 <= min_scale <= max_scale:
            raise OptimizerError(
                f"found min_scale={min_scale} and max_scale={max_scale}, expected 0 <= min_scale <= max_scale: "
                "swap them, or leave them out for 2**-24 and 2**64"
            )
        if self._enabled and not min_scale <= init_scale <= max_scale:
            self._init_scale = min(max(init_scale, min_scale), max_scale)
            if init_scale != 2.0**16:  # someone asked for it
                warn_user(
                    f"found init_scale={init_scale!r}, expected one from min_scale={min_scale} to "
                    f"max_scale={max_scale}: the scale begins at the bound; to begin beyond it, move the bound"
                )
        self._min_scale, self._max_scale = min_scale, max_scale
        self._records = Records()  # they belong to this process: pickles leave them out

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_records"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._records = Records()

    @marks.run_untraced
    @marks.named("amp: GradScaler.clip_grad_norm_")
    def clip_grad_norm_(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float | Tensor,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the gradients of `optimizer`, unscaled, to a global norm of `max_norm` in its next `step`.

        `max_norm`: a number, or a tensor of one on the gradients' device, which isn't read by the host. Call it once
        gradients are complete, instead of `unscale_` and `torch.nn.utils.clip_grad_norm_`; like
        `unscale_`, it looks for overflows, and belongs to one iteration. Returns the norm before clipping, 0-dim on the
        gradients' device. No host sync, unless `error_if_nonfinite` asks for an error where torch's function raises
        one. On the fused path, which takes L2 norms, `.grad` itself stays as it is, and `foreach` makes no difference;
        elsewhere torch's function clips in place.
        Raises RuntimeError after `step`, OptimizerError for new gradients without an `update` since the last clipping
        and for parameters in place of the optimizer.
        """
        how = max_norm, norm_type, error_if_nonfinite, foreach
        later = (max_norm, error_if_nonfinite) if float(norm_type) == 2 else None
        return self._clip("clip_grad_norm_", optimizer, nn.utils.clip_grad_norm_, how, later)

    @marks.run_untraced
    @marks.named("amp: GradScaler.clip_grad_value_")
    def clip_grad_value_(
        self, optimizer: torch.optim.Optimizer, clip_value: float, foreach: bool | None = None
    ) -> None:
        """Clip each element of the gradients of `optimizer`, unscaled, to between `-clip_value` and `clip_value`.

        Call it once gradients are complete, instead of `unscale_` and `torch.nn.utils.clip_grad_value_`, of which it
        has the bits: it looks for overflows first, and changes `.grad` in place. No host sync.
        Raises RuntimeError after `step`, OptimizerError for new gradients without an `update` since the last clipping
        and for parameters in place of the optimizer.
        """
        self._clip("clip_grad_value_", optimizer, clip_values, (clip_value, foreach))

    def _clip(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        in_place: Any,
        how: tuple[Any, ...],
        later: tuple[float | Tensor, bool] | None = None,
    ) -> Any:
        """Clip an optimizer's gradients: in its step, if there are arguments for that and the kernels can, else now,
        by the function `in_place` of its parameters and `how`.
        """
        state = self._begin(name, optimizer)
        fused = None if later is None else self._fused_step(optimizer, {})
        step = step_of(optimizer)
        if state is None:
            if step is not None:
                step.end_iteration()
        elif state["stage"] is OptState.STEPPED:
            raise RuntimeError(f"{name}() is being called after step().")
        elif "clipped" in state and not state["clipped"].match(gradients(optimizer)):
            raise OptimizerError(
                f"found new gradients at a second clipping of this optimizer's, by {name}(), since the last update(), "
                "expected those of one iteration: call update() also where you leave out step()"
            )
        scaling: tuple[Any, ...] = ()  # if the gradients are still scaled
        if state is not None and state["stage"] is OptState.READY:
            state["unscaled_by"], scaling = name, (self._scale, partial(state.update, stage=OptState.UNSCALED))
        try:
            if fused is not None and later is not None and (norm := fused.measure(*later, *scaling)) is not None:
                return norm
            if scaling:
                self.unscale_(optimizer)
            if step is not None:
                step.apply_pending(optimizer)
            return in_place(parameters(optimizer), *how)
        finally:
            try:
                note_clipped(optimizer, state, bool(scaling))
            except BaseException:  # Ctrl-C: without a record, the next iteration's gradients would pass for these
                note_clipped(optimizer, state, bool(scaling))
                raise

    @marks.run_untraced
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Take a step of `optimizer` with unscaled gradients, or none if one of them is infinite or NaN.

        Like `torch.amp.GradScaler.step`, but for SGD, Adam and AdamW the kernels decide, and `.grad` stays scaled
        unless `unscale_` was called. Passes arguments to `optimizer.step`, and returns its result. Raises RuntimeError
        for a closure and for a second step without `update`, OptimizerError for gradients that changed since the
        clipping and for parameters in place of the optimizer.
        """
        if self._enabled and "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        with marks.region("amp: GradScaler.step"):
            return self._step(optimizer, args, kwargs)

    def _step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        unscaled: dict[str, Any] = {"stage": OptState.UNSCALED, "found_inf_per_device": {}}
        state, result = self._begin("step", optimizer) or unscaled, None
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        plain, flags = not kwargs and all(arg is None for arg in args), state["found_inf_per_device"]
        fused = self._fused_step(optimizer, flags) if plain else None
        if not self._enabled:
            fused = None
        elif fused is not None and state["stage"] is OptState.READY:
            assert self._scale is not None
            if (looked := fused.look(self._scale)) is not None:
                state["found_inf_per_device"] = looked
            elif amp_aware(optimizer) and any(grad.dtype == torch.float16 for grad in gradients(optimizer)):
                fused = None  # they can't be unscaled in place
            else:  # such as DTensors
                self.unscale_(optimizer)
            flags = state["found_inf_per_device"]
        if fused is not None and flags:
            hand_over(optimizer, None, flags.values())
        elif not self._enabled or gradients(optimizer) or amp_aware(optimizer):
            result = generic_step(self, optimizer, state, args, kwargs)
            flags = state["found_inf_per_device"]
        state["stage"], state["idle"] = OptState.STEPPED, self._enabled and not flags and not gradients(optimizer)
        self._records.note_step(optimizer, tuple(flags.values()))
        if (step := fused or step_of(optimizer)) is not None:
            step.pending = None  # the step has applied it
        return result

    @marks.run_untraced
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of `optimizer` in place, as torch's does, once an iteration.

        Raises RuntimeError after `step`, and after `unscale_` or a clipping, which unscales too.
        """
        if not self._enabled:
            return
        state = self._begin("unscale_", optimizer)
        if state["stage"] is OptState.UNSCALED and "unscaled_by" in state:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(), by "
                f"{state['unscaled_by']}(), which unscales before it clips: leave out one of the two"
            )
        super().unscale_(optimizer)

    def _fused_step(self, optimizer: Any, flags: dict[torch.device, Tensor]) -> FusedStep | None:
        """Return the step of an optimizer of ours, or that becomes one, which unscales and skips by itself; None, and
        the reason is logged, for one that takes the generic path.
        """
        if self._enabled and not are_plain(self._scale, *flags.values()):
            reason: str | None = "the scale or a flag has no memory"
        else:
            reason = obstacle_of(optimizer)
        if reason is None:
            return step_of(optimizer) or adopt(optimizer)
        if reason not in (told := self._records[optimizer].told):
            told.add(reason)
            log.info("the step of %s takes the generic path: %s", type(optimizer).__name__, reason)
        return None

    def _begin(self, name: str, optimizer: torch.optim.Optimizer) -> Any:
        """Return the iteration's state of an optimizer, for the method `name`; None if the scaler doesn't scale.

        Torch keeps it by id: that of an optimizer that is gone and had this id isn't meant.
        """
        if not hasattr(optimizer, "param_groups"):  # but parameters, as torch's clipping takes
            raise OptimizerError(
                f"found {type(optimizer).__name__!r} as the first argument of {name}(), expected the optimizer of "
                f"these gradients: write scaler.{name}(optimizer{', …' if 'clip' in name else ''})"
            )
        reference = self._records[optimizer].optimizer
        if not self._enabled:
            return None
        self._check_scale_growth_tracker(name)
        key, states = id(optimizer), self._per_optimizer_states
        if states[key].setdefault("optimizer", reference)() is not optimizer:
            del states[key]
            states[key]["optimizer"] = reference
        return states[key]

    def _check_scale_growth_tracker(self, name: str) -> tuple[Tensor, Tensor]:
        if self._scale is not None and storages.is_wrapped(self._scale):  # made within a transform
            self._scale, self._growth_tracker = map(storages.unwrapped, (self._scale, self._growth_tracker))
        return super()._check_scale_growth_tracker(name)

    @marks.named("amp: GradScaler.unscale_")
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if (step := step_of(optimizer)) is not None:
            step.require_unscaled()
        return unscale_grads(optimizer, inv_scale, found_inf, allow_fp16, self._records[optimizer].workspaces)

    @marks.run_untraced
    @marks.named("amp: GradScaler.update")
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale, or set it to `new_scale`, a number or a float32 tensor of one; begin a new iteration.

        No host sync. An iteration in which no optimizer had a gradient leaves the scale and its growth as they are. The
        scale ends up between `min_scale` and `max_scale`, a `new_scale` too.
        """
        if not self._enabled:
            self._records.end_iteration()
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        number = new_scale is not None and not isinstance(new_scale, Tensor)
        if number and store.capture is not None and tables.capturing(scale.device):
            self._per_optimizer_states = optimizers.fresh_optimizer_states()  # nothing of the capture is run
            raise CaptureError(
                f"found update({new_scale!r}) in a captured step, expected a scale that replays can follow: give a "
                "float32 tensor on the GPU, which you write between calls"
            )
        by_optimizer = self._per_optimizer_states
        states = by_optimizer.values()
        found = [storages.unwrapped(flag) for state in states for flag in state["found_inf_per_device"].values()]
        flags = [on_device(scale.device, flag) for flag in found]
        watch: SkipWatch | None = None
        if flags and new_scale is None and dispatcher.acting_mode() is None and are_plain(scale, *flags):
            watch = self._records.watch = self._records.watch or SkipWatch(scale.device)
            growth = self._growth_factor, self._backoff_factor, self._growth_interval
            update_scale_(scale, growth_tracker, watch.skips, flags, *growth, self._min_scale, self._max_scale)
        elif flags or new_scale is not None or not any(state.get("idle") for state in states):
            try:
                super().update(new_scale)
            finally:
                self._per_optimizer_states = by_optimizer  # the iteration ends below, with its pending factors
            optimizers.clamp_(scale, self._min_scale, self._max_scale)
        fresh = optimizers.fresh_optimizer_states()
        self._records.end_iteration(partial(setattr, self, "_per_optimizer_states", fresh))
        if watch is not None:
            watch.look()  # last: its warning may be an error

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class or of torch's returned; the scale is kept within its bounds."""
        try:
            super().load_state_dict(state_dict)
        finally:
            if self._enabled and self._scale is not None:
                self._scale.clamp_(self._min_scale, self._max_scale)
            elif self._enabled:
                self._init_scale = min(max(self._init_scale, self._min_scale), self._max_scale)

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return whether the latest `step` of this optimizer was skipped: 0-dim bool on the device, no host sync.

        Raises OptimizerError before the first.
        """
        return self._records[optimizer].skipped()

    @property
    def last_step_skipped(self) -> Tensor:
        """True if the latest `step`, of any optimizer, was skipped: 0-dim bool on the device, no host sync.

        Raises OptimizerError before the first.
        """
        return self._records.latest.skipped()
