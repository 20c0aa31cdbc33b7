"""What the scaler uses of torch's private parts."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.amp import grad_scaler
from torch.optim import optimizer


def global_step_hooks() -> list[Callable[..., Any]]:
    """Hooks registered for every optimizer's `step`, before and after; torch lists them nowhere in public."""
    before, after = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
    return [*before.values(), *after.values()]


def fresh_optimizer_states() -> dict[int, dict[str, Any]]:
    """`GradScaler._per_optimizer_states` as it is at the start of an iteration; pickles."""
    return defaultdict(grad_scaler._refresh_per_optimizer_state)
