"""Private parts of torch that the scaler uses."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import grad_scaler
from torch.optim import optimizer

Hook = Callable[..., Any]


def step_hooks(instance: Any) -> list[Hook]:
    """Hooks before and after this optimizer's `step`, global ones too; torch has no public list of them."""
    everywhere = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
    hooks = (instance._optimizer_step_pre_hooks, instance._optimizer_step_post_hooks, *everywhere)
    return [hook for table in hooks for hook in table.values()]


def pre_hooks(instance: Any) -> list[Hook]:
    """Hooks registered ahead of this optimizer's `step`; none if it is no optimizer of torch's."""
    return list(getattr(instance, "_optimizer_step_pre_hooks", {}).values())


def named_pre_hooks(instance: Any) -> dict[Any, Any]:
    """The table of those hooks, to register one under a name of ours; an empty one if it is no optimizer of torch's."""
    return getattr(instance, "_optimizer_step_pre_hooks", {})


def writes_only_parameters(instance: Any) -> bool:
    """True for an optimizer of torch's own without hooks: its step surely writes nothing but its parameters."""
    hooked = instance._optimizer_step_pre_hooks or instance._optimizer_step_post_hooks
    return not hooked and type(instance).__module__.startswith("torch.optim.")


def replace_step(instance: Any, step: Hook, reduce: Hook) -> dict[str, Any]:
    """Set a step on an optimizer, not on its class, that unscales and skips as torch's fused ones do; and `reduce`,
    with which it is copied and pickled. Returns what `restore_step` sets again.
    """
    own = {"step": step, "__reduce_ex__": reduce, "_step_supports_amp_scaling": True}
    before = {name: vars(instance)[name] for name in own if name in vars(instance)}
    vars(instance).update(own)
    return before


def restore_step(instance: Any, before: dict[str, Any]) -> None:
    """Remove what `replace_step` has set."""
    for name in ("step", "__reduce_ex__", "_step_supports_amp_scaling"):
        del vars(instance)[name]
    vars(instance).update(before)


def fresh_optimizer_states() -> dict[int, dict[str, Any]]:
    """`GradScaler._per_optimizer_states` as it is at the start of an iteration; pickles."""
    return defaultdict(grad_scaler._refresh_per_optimizer_state)


add_: Any = torch._foreach_add_
copy_: Any = torch._foreach_copy_
multiply_: Any = torch._foreach_mul_
check_and_unscale_: Any = torch._amp_foreach_non_finite_check_and_unscale_
update_scale_: Any = torch._amp_update_scale_
