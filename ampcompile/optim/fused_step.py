"""The step of one optimizer, whoever takes it: by the kernels where they can, else by torch's."""

import logging
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ampcompile.errors import OptimizerError
from ampcompile.kernels.check_grads import Checked
from ampcompile.kernels.planned import Marks
from ampcompile.kernels.tables import SettingsTable, float_bits
from ampcompile.torch_private import dispatcher, marks, optimizers, storages
from ampcompile.weights import reports
from ampcompile.weights.release import refuse_step
from ampcompile.weights.table import STEPS

from . import checkpoints
from .masters import KEEPERS, Masters, step_on_masters
from .plan import (
    NARROW,
    NotFusedError,
    Plan,
    amp_aware,
    family_of,
    gradients,
    move_step_counts_to_cpu,
    numbers_of,
    on_device,
    parameters,
    require_tensors,
)
from .states import States

log = logging.getLogger(__name__)
NAME = "ampcompile: step"
NOT_FINITE = (
    "The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped. To disable "
    "this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
)
"""torch's words"""

OTHERS = (
    "found gradients that were written or replaced since clip_grad_norm_(), expected those that it measured: "
    "its clipping is part of the step. Clip again after the last change of gradients, or by "
    "torch.nn.utils.clip_grad_norm_(). With a scaler, call update() at the end of every iteration, also of one without "
    "a step, and unscale_() before torch's clipping"
)


@dataclass(eq=False)
class Pending:
    """A clipping that waits for the step: what was measured of an iteration's gradients, and the factor for them.

    Other gradients never get the factor: it is dropped with the gradients, or OptimizerError is raised.
    """

    factor: Tensor
    """Clips the gradients, and unscales them if there is a scale"""
    marks: Marks
    """Identities and versions of the gradients"""
    measured: Checked
    """Norm and digest before any clipping, to know the gradients again: a replayed graph writes others in place, and
    raises no version"""
    count: int
    """How many there are"""
    scale: Tensor | None
    """The scaler's scale, by which they are still multiplied; None: the clipping took them for unscaled ones"""
    over: bool = False
    """The step was taken, or the iteration has ended: if gradients change then, they are the next iteration's, and the
    clipping is dropped. Before, that is an error: it would apply to other gradients than it was computed for"""

    def measure_again(self, plan: Plan) -> None:
        """Keep the factor only for gradients that have norm and digest to the bit. The host doesn't wait."""
        before, self.measured = self.measured, plan.check(self.scale, None)
        pairs = zip(before[2:], self.measured[2:], strict=True)
        norm, digest = (a.view(torch.int32) == b.view(torch.int32) for a, b in pairs)
        self.factor = torch.where(norm & digest, self.factor, self.measured.multiplier)


def call_without_interrupt(calls: Iterable[Callable[[], object]]) -> None:
    """Call C functions in turn. No signal handler runs in between: Python runs them between bytecodes only."""
    # `deque` walks the `map` in C; a loop of Python's has bytecodes between the calls.
    deque(map(operator.call, calls), maxlen=0)


class FusedStep:
    """All that is known of the step of an optimizer of ours: the plan, the clipping that waits for it, masters.

    The optimizer has it as `_ampcompile_step`, where wrappers find it. It is a hook ahead of torch's step, too.
    """

    running = False  # True in the optimizer's own step, with its hooks
    pending: Pending | None = None
    masters: Masters | None = None
    state_dict_device: str | None = None  # where `state_dict` is made; None: on the parameters' devices
    states: States | None = None
    reason: str | None = None  # the reason that the latest step was torch's
    _plan: Plan | None = None  # the latest, made anew if something that it depends on has changed
    _looked: tuple[Tensor, Plan | None, Tensor] | None = None  # by `look`: a scaler's flag, a plan, what unscales

    def __init__(self, optimizer: Any, exchanged: bool = False) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.exchanged = exchanged  # the optimizer was one of torch's class
        self.workspaces: dict[torch.device, dict[str, Any]] = {}  # the buffers that kernels keep between calls
        self.settings, self._written = SettingsTable(), list[Any]()  # for captured steps, and what was written there
        self._told: set[str] = set()
        optimizers.named_pre_hooks(optimizer)[NAME] = self
        self._hooks = [
            optimizer.register_state_dict_pre_hook(move_step_counts_to_cpu),
            optimizer.register_state_dict_post_hook(checkpoints.to_file, prepend=True),
            optimizer.register_load_state_dict_post_hook(checkpoints.restore, prepend=True),
            optimizer.register_load_state_dict_pre_hook(checkpoints.from_file),
        ]

    def see_loads_last(self) -> None:
        """Check what is loaded after a user's hooks, which may rename what there is."""
        self._hooks.pop().remove()
        self._hooks.append(self.living_optimizer().register_load_state_dict_pre_hook(checkpoints.from_file))

    @marks.run_untraced
    def __call__(self, optimizer: Any, *_: Any) -> None:
        """Prepare what another step reads: it is clipped too, and finds its counts where torch keeps them."""
        if self.running or optimizer is not self.optimizer():  # a wrapper, whose step calls the optimizer's
            return
        if self.exchanged and not self.plain:
            raise OptimizerError(
                f"found a step of torch's {type(optimizer).__name__} that was taken from the optimizer before "
                "keep_masters(), expected the optimizer's own, which knows its state: call keep_masters() before "
                "what takes its step, such as Accelerate's prepare()"
            )
        self.settings.followed = False  # that step may read the groups
        self.apply_pending(optimizer)
        move_step_counts_to_cpu(optimizer)

    @property
    def plain(self) -> bool:
        """True where all state is torch's: neither masters nor codes are kept."""
        return self.masters is None and self.states is None

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The types of parameters that the kernels take."""
        return (torch.float32,) if self.masters is None else (torch.float32, *NARROW)

    def keep_masters(self, how: str, seed: int) -> None:
        """Step on masters from now on."""
        self.masters = masters = Masters(how, seed, self.optimizer)
        KEEPERS.add(masters)

    def code_states(self, how: str | Mapping[str, str], seed: int, chosen: dict[int, str]) -> None:
        """Keep states in 16 or 8 bits from now on."""
        self.states = States(how, seed, lambda: self.masters, chosen)

    def end(self) -> None:
        """Leave the optimizer to torch, with its state, one parameter's after the other's, and gradients as torch has
        them.
        """
        optimizer = self.living_optimizer()
        self.apply_pending(optimizer)
        move_step_counts_to_cpu(optimizer)
        for param in parameters(optimizer):
            if self.states is not None and param in optimizer.state:
                optimizer.state[param] = self.states.decoded(param.detach(), optimizer.state[param])
            if self.masters is not None:
                self.masters.remove_from(param, optimizer.state)
        if self.masters is not None:
            KEEPERS.discard(self.masters)
        self.masters = self.states = None
        for name in checkpoints.OWN_SETTINGS:
            optimizer.defaults.pop(name, None)
        del optimizers.named_pre_hooks(optimizer)[NAME]
        while self._hooks:
            self._hooks.pop().remove()

    def living_optimizer(self) -> Any:
        """Return the optimizer itself, also for a wrapper of it; OptimizerError if it is gone."""
        if (optimizer := self.optimizer()) is None:
            raise OptimizerError(
                "found a step whose optimizer was deleted, expected one that is there: hold the optimizer, not its "
                "`step` alone"
            )
        return optimizer

    def plan(self, optimizer: Any, only_grads: bool = False) -> Plan | None:
        """Return the plan of the step, or None if the kernels can't take it; while no mode acts."""
        plan, self._plan = self._plan, None
        try:
            names, groups = family_of(optimizer).kind, optimizer.param_groups
            decisive = [bool(group[name]) for group in groups for name in names]
            kind = decisive, amp_aware(optimizer), self.masters, self.states
            if plan is None or not plan.holds(optimizer, kind, only_grads):
                if not only_grads:
                    refuse_step(optimizer)
                    reports.note_own_step(optimizer)
                plan = Plan(optimizer, self, kind, only_grads)
            if not only_grads:
                plan.read_settings(groups)
        except NotFusedError as reason:
            whose = "is torch's own" if self.masters is None else "on float32 masters is torch's"
            self.tell(f"{whose}: {reason}")
            return None
        if not only_grads:  # the gradients alone don't tell
            self.reason = None
        self._plan = None if plan.distributed else plan
        return plan

    def write_settings(self, device: torch.device) -> None:
        """Write the groups' settings, if they changed, where captured steps read them; the host doesn't wait."""
        optimizer = self.living_optimizer()
        read = list(map(family_of(optimizer).read, optimizer.param_groups))
        if not self._written or read != self._written:
            self.workspaces.setdefault(device, {})["settings"] = self.settings
            try:
                self.settings.upload(float_bits(numbers_of(read)[1]), device)
            except NotFusedError:
                return
            self._written = [] if any(isinstance(value, Tensor) for row in read for value in row) else read

    def describe(self) -> str:
        """Return in words whether the step is fused, as far as that is known before it, and if not, why."""
        optimizer = self.living_optimizer()
        try:
            if (mode := dispatcher.acting_mode()) is not None:
                raise NotFusedError(f"{mode} has to see its operations")
            if not storages.include_dtensors(params := parameters(optimizer)):
                require_tensors("parameter", params, self.dtypes)
        except NotFusedError as reason:
            return f"torch's own: {reason}"
        self.plan(optimizer, only_grads=True)
        return "fused" if self.reason is None else self.reason.removeprefix("is ")

    def tell(self, reason: str) -> None:
        """Log, once, why a step isn't a fused one."""
        self.reason = reason
        if reason not in self._told:
            self._told.add(reason)
            log.info("the step of %s %s", type(self.optimizer()).__name__, reason)

    def factor(self, optimizer: Any, plan: Plan | None, unscaling: bool = False) -> Tensor | None:
        """Return the factor of a clipping that waits, for the gradients of now, which are to be unscaled or not."""
        if unscaling:
            self.require_unscaled()
        if self.pending is None:
            return None
        if not self.pending.marks.match(gradients(optimizer) if plan is None else plan.gradients):
            if not self.pending.over:
                raise OptimizerError(OTHERS)
            self.pending = None
        elif self.pending.over:
            if (plan := plan or self.plan(optimizer, only_grads=True)) is None:
                self.pending = None
            elif plan.count == self.pending.count:
                self.pending.measure_again(plan)
            else:  # nobody can tell if those that are left were written
                self.pending = None
                raise OptimizerError(OTHERS)
        return None if self.pending is None else self.pending.factor

    def apply_pending(self, optimizer: Any, unscaling: bool = False) -> None:
        """Clip in place, where others than our step read the gradients. Modes that act now don't see it, as they began
        later.
        """
        if self.pending is not None:
            with dispatcher.outside_of_modes():
                if (factor := self.factor(optimizer, None, unscaling)) is not None:
                    self.multiply(optimizer, factor)

    def multiply(self, optimizer: Any, multiplier: Tensor) -> None:
        """Multiply the gradients in place, by the factor that waited too, which is dropped."""
        grads = gradients(optimizer)
        values = [grad._values() if grad.is_sparse else grad for grad in grads]
        calls: list[Callable[[], object]] = [
            partial(optimizers.multiply_, [v for v in values if v.device == device], on_device(device, multiplier))
            for device in dict.fromkeys(value.device for value in values)
        ]
        if self.pending is not None:
            # Without an interrupt between: the factor would still wait, and the next step multiply by it once more.
            # A scaler that has these marks finds the gradients unchanged.
            calls += [self.pending.marks.renewal(grads), partial(setattr, self, "pending", None)]
        with torch.no_grad():
            call_without_interrupt(calls)

    def end_iteration(self) -> None:
        """Let other gradients drop a clipping that waits, and not raise; for the same ones it stays."""
        if self.pending is not None:
            self.pending.over = True

    def require_unscaled(self) -> None:
        """Raise where gradients are to be unscaled that a clipping took for unscaled ones, and drop it."""
        if self.pending is not None and self.pending.scale is None and not self.pending.over:
            self.pending = None
            for name in ("grad_scale", "found_inf"):  # torch's scaler leaves them, and the next step would read them
                vars(self.living_optimizer()).pop(name, None)
            raise OptimizerError(
                "found a scaler that unscales gradients after clip_grad_norm_() of their optimizer, expected them "
                "unscaled before: its norm is that of scaled gradients. Call scaler.unscale_(optimizer) first, or clip "
                "by clip_grad_norm_(optimizer, max_norm) of ampcompile.GradScaler"
            )

    def look(self, scale: Tensor) -> dict[torch.device, Tensor] | None:
        """Look for overflows in gradients that are scaled, ahead of the step, which follows at once.

        Returns an overflow flag by device, none without gradients; None if the kernels can't.
        """
        optimizer = self.living_optimizer()
        plan = self.plan(optimizer, only_grads=self._plan is None)
        if plan is None or plan.distributed:
            plan = self.plan(optimizer, only_grads=True)
        if plan is None:
            return None
        if not plan.count:
            return {}
        checked = plan.check(scale, self.factor(optimizer, plan, unscaling=True))
        self._looked = checked.found_inf, None if plan.only_grads else plan, checked.multiplier
        return {plan.device: checked.found_inf}

    def measure(
        self,
        max_norm: float | Tensor,
        error_if_nonfinite: bool = False,
        scale: Tensor | None = None,
        note: Callable[..., None] | None = None,
    ) -> Tensor | None:
        """Take the gradients' norm, and let the step clip them to `max_norm`; None if the kernels can't.

        `scale`: a scaler's, by which they are unscaled, too. `note`: its C function that notes the overflow flags.
        """
        if (plan := self.plan(optimizer := self.living_optimizer(), only_grads=True)) is None:
            return None
        if not plan.count:
            if note is not None:
                note()
            return torch.zeros((), dtype=torch.float32)
        before = self.factor(optimizer, plan, scale is not None)
        checked = plan.check(scale, before, max_norm)
        factor, norm = checked.multiplier, checked.norm
        if failed := error_if_nonfinite and not norm.isfinite():
            factor = plan.check(scale, before).multiplier
        raw, known = (checked, None) if self.pending is None else (self.pending.measured, self.pending.scale)
        pending = Pending(factor, Marks(plan.gradients), raw, plan.count, known if scale is None else scale)
        calls = [partial(setattr, self, "pending", pending)]
        if note is not None:
            calls.append(partial(note, found_inf_per_device={plan.device: checked.found_inf}))
        call_without_interrupt(calls)
        if failed:
            raise RuntimeError(NOT_FINITE)
        return norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the optimizer's own step, with its hooks; see `torch.optim.Optimizer.step`."""
        optimizer = self.living_optimizer()
        handed = self._looked is not None and self._looked[0] is vars(optimizer).get("found_inf")
        hooked = not handed and optimizers.foreign_hook(optimizer) is not None  # else our scaler has asked
        # A user's hook may write anything, and so may a step that calls this one: then as torch's steps are reported.
        if hooked or (STEPS and reports.in_step(optimizer)):
            if hooked:
                self.apply_pending(optimizer, getattr(optimizer, "grad_scale", None) is not None)  # hooks see it
            self.running = True
            try:
                return _take_with_hooks(optimizer, *(() if closure is None else (closure,)))
            finally:
                self.running = False
        with optimizers.step_region(optimizer) if marks.profiling() else nullcontext():
            return self.take(optimizer, closure)

    def take(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        """Take a step by the kernels where they can, else by torch's optimizer, with masters on float32 weights.

        It unscales gradients and skips, as torch's fused optimizers do, where a scaler set `grad_scale`, `found_inf`;
        and clips, if that waits for the step. Where the kernels can, or masters are kept, gradients stay as they are.
        """
        own, loss = vars(optimizer), None
        looked, self._looked = self._looked, None
        if looked is not None and looked[0] is not own.get("found_inf"):
            looked = None
        if (mode := None if looked else dispatcher.acting_mode()) is not None:
            if not self.plain:
                whose = "coded states" if self.masters is None else "masters"
                raise OptimizerError(
                    f"found a step with {whose} under {mode}, expected one outside of it: torch's optimizers, whose "
                    f"operations it could see, have no {whose}"
                )
            self.apply_pending(optimizer)
        if closure is not None:
            self.apply_pending(optimizer)  # to the gradients before the closure's
            with torch.enable_grad():
                loss = closure()
        if mode is not None:  # torch's step unscales and skips by itself where ours would
            self._step_by_torch(optimizer, None)
            return loss
        given = {name: own.pop(name) for name in ("grad_scale", "found_inf") if name in own}
        scale, found_inf = given.get("grad_scale"), given.get("found_inf")
        plan = (looked[1] if looked else None) or self.plan(optimizer)
        multiplier = looked[2] if looked else self.factor(optimizer, plan, scale is not None)
        if plan is None and self.plain and all(group["fused"] for group in optimizer.param_groups):
            own.update(given)
            self._step_by_torch(optimizer, multiplier)  # which unscales and skips
        else:
            if scale is not None:
                inverse = scale.double().reciprocal().float()
                multiplier = inverse if multiplier is None else multiplier * on_device(multiplier.device, inverse)
            if plan is not None:
                plan.run(optimizer, multiplier, found_inf)
            elif found_inf is None or not found_inf:
                self._step_by_torch(optimizer, multiplier)
            own.update(given)  # for the scaler, which takes them off; after an error the next step would read them
        if self.pending is not None:
            self.pending.over = True  # another step on these gradients clips them too
            if plan is not None and plan.count != self.pending.count:  # some were dropped before the step
                self.pending.count, self.pending.measured = plan.count, plan.check(self.pending.scale, None)
        return loss

    def _step_by_torch(self, optimizer: Any, multiplier: Tensor | None) -> None:
        refuse_step(optimizer)
        self.settings.followed = False
        move_step_counts_to_cpu(optimizer)
        if self.states is not None:
            return self.states.step_by_torch(optimizer, multiplier)
        if self.masters is not None:
            return step_on_masters(optimizer, self.masters, multiplier)
        if multiplier is not None:
            self.multiply(optimizer, multiplier)
        with reports.untold_step(optimizer):
            optimizers.bare_step(optimizer)


@torch.optim.Optimizer.profile_hook_step
def _take_with_hooks(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
    return optimizer._ampcompile_step.take(optimizer, closure)


def step_of(optimizer: Any) -> FusedStep | None:
    """Return the step of an optimizer of ours, or of what wraps one; None for others."""
    return getattr(optimizer, "_ampcompile_step", None)
