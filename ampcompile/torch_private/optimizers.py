"""Private parts of torch's optimizers and scaler."""

import contextlib
import functools
import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp import grad_scaler
from torch.optim import optimizer

Hook = Callable[..., Any]
TORCHS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
OURS: list[type] = []  # our classes, whose steps kernels can take
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_FOLDER = os.path.dirname(inspect.getfile(torch.optim))


_BARE_STEPS = {
    kind: inspect.unwrap(kind.step, stop=lambda function: not getattr(function, "hooked", False)) for kind in TORCHS
}
STEPS: dict[type, Any] = {
    kind: inspect.unwrap(kind.step)
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
}
"""The innermost functions of torch's steps as they were at import; and ours"""


def plain_name(name: str) -> str:
    """Return the name of a module or parameter without the attributes in which wrappers hold a module."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def register(kind: Any) -> None:
    """Add a class of ours, whose step kernels can take."""
    STEPS[kind] = kind.step
    OURS.append(kind)


def is_ours(kind: type) -> bool:
    """Return True for a class of ours, and for subclasses of it."""
    return issubclass(kind, tuple(OURS))


def torchs_class(instance: Any) -> Any:
    """Return the class of torch's that an optimizer is of."""
    return next(kind for kind in type(instance).__mro__ if kind in TORCHS)


def bare_step(instance: Any) -> None:
    """Take the step of torch's class, without hooks, whatever has replaced it."""
    _BARE_STEPS[torchs_class(instance)](instance)


def foreign_step(instance: Any) -> Any:
    """Return what stands in for the step of torch's class or of ours, or around it; None if nothing does."""
    own = vars(instance).get("step")
    return foreign_class_step(type(instance)) if own is None else _foreign_layer(own, type(instance))


def replaced_step(instance: Any) -> Any:
    """Return what stands in for the step, also a bound step of the class, which Accelerate leaves; None if only a
    scheduler of torch's wraps it.
    """
    own = vars(instance).get("step")
    return own if own is not None and not hasattr(own, "_wrapped_by_lr_sched") else foreign_step(instance)


@functools.cache
def _known(kind: type) -> Any:
    return next((STEPS[base] for base in kind.__mro__ if base in STEPS), None)


def _foreign_layer(step: Any, kind: type) -> Any:
    """Follow a step and what it wraps, as torch's LR schedulers wrap `step`; return the first function not torch's.

    None if they lead to the step of `kind`, else the last one.
    """
    while (function := getattr(step, "__func__", step)) is not _known(kind):
        code, step = getattr(function, "__code__", None), getattr(function, "__wrapped__", None)
        if step is None or code is None or not code.co_filename.startswith(_FOLDER):
            return function
    return None


_of_class = functools.cache(_foreign_layer)


def foreign_class_step(kind: Any) -> Any:
    """Return what stands in for the step in the class of an optimizer."""
    return _of_class(kind.step, kind)


def hook_tables(instance: Any) -> dict[str, dict[Any, Hook]]:
    """The tables of the hooks before and after this optimizer's `step`."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return {name: vars(instance)[name] for name in names if name in vars(instance)}


def global_hook_tables() -> dict[str, dict[Any, Hook]]:
    """The tables of the hooks of all modules and optimizers, by their names."""
    everywhere = {**vars(torch.nn.modules.module), **vars(optimizer)}
    return {name: held for name, held in everywhere.items() if name.startswith("_global_") and isinstance(held, dict)}


def foreign_hook(instance: Any) -> Hook | None:
    """Return the first hook before or after the `step` of this optimizer, or of all, that isn't ours; None if all are.

    torch has no public list of them.
    """
    own = instance._optimizer_step_pre_hooks, instance._optimizer_step_post_hooks
    for hooks in (*own, optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks):
        for hook in hooks.values():
            if not str(getattr(hook, "__module__", "")).startswith("ampcompile."):
                return hook
    return None


def is_bare(instance: Any) -> bool:
    """Return True if neither a patch nor a hook of others is around the step of an optimizer."""
    return foreign_step(instance) is None and foreign_hook(instance) is None


def named_pre_hooks(instance: Any) -> dict[Any, Any]:
    """The table of the hooks before `step`, to register one by a name of ours; an empty one for what isn't torch's."""
    return getattr(instance, "_optimizer_step_pre_hooks", {})


def writes_only_parameters(instance: Any) -> bool:
    """True for torch's own optimizers, ours, and subclasses of ours without a step of their own, if they have no hooks
    of others: the step surely writes only its parameters.
    """
    kind = type(instance)
    return (kind in STEPS or is_ours(kind)) and foreign_class_step(kind) is None and foreign_hook(instance) is None


@contextlib.contextmanager
def step_region(instance: Any) -> Iterator[None]:
    """A region as torch's of a step in profiles, which learn in it what tensors are the optimizer's."""
    with torch.autograd.profiler.record_function(f"Optimizer.step#{type(instance).__name__}.step"):
        yield
        instance._optimizer_step_code()


def exchange_class(instance: Any, kind: Any) -> list[Callable[[], object]]:
    """Return C functions that make an optimizer one of another class. A bound step of the former class that stands on
    the optimizer goes, and what a scheduler of torch's has put there calls the step of the new class.
    """
    former, own = type(instance).step, vars(instance).get("step")
    calls: list[Callable[[], object]] = [functools.partial(setattr, instance, "__class__", kind)]
    if getattr(own, "__func__", None) is former:
        calls.append(functools.partial(delattr, instance, "step"))
    for cell in getattr(own, "__closure__", None) or ():
        if cell.cell_contents is former:
            calls.append(functools.partial(setattr, cell, "cell_contents", kind.step))
            calls.append(functools.partial(setattr, own, "__wrapped__", kind.step))
    return calls


def mark_amp_aware(instance: Any, aware: bool = True) -> None:
    """Tell scalers that an optimizer unscales and skips by itself, as torch's fused ones do, or that it doesn't."""
    if aware:
        vars(instance)["_step_supports_amp_scaling"] = True
    else:
        vars(instance).pop("_step_supports_amp_scaling", None)


def fresh_optimizer_states() -> dict[int, dict[str, Any]]:
    """`GradScaler._per_optimizer_states` as it is at the start of an iteration; pickles."""
    return defaultdict(grad_scaler._refresh_per_optimizer_state)


def clamp_(tensor: torch.Tensor, least: float, most: float) -> None:
    """Clamp a tensor in place, also one from outside of a transform of torch.func, where `clamp_` raises."""
    torch._foreach_clamp_min_([tensor], least)
    torch._foreach_clamp_max_([tensor], most)


add_: Any = torch._foreach_add_
copy_: Any = torch._foreach_copy_
multiply_: Any = torch._foreach_mul_
check_and_unscale_: Any = torch._amp_foreach_non_finite_check_and_unscale_
update_scale_: Any = torch._amp_update_scale_
