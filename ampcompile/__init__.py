"""Mixed precision as a compiler pass: `torch.compile(model, backend="amp")`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .explain import explain
    from .policy import Policy
    from .rules import register_op
    from .scaler import GradScaler
    from .weights import invalidate, weight_stats

__all__ = ["GradScaler", "Policy", "explain", "invalidate", "register_op", "weight_stats"]

_WHERE = {
    "GradScaler": "scaler",
    "Policy": "policy",
    "explain": "explain",
    "invalidate": "weights",
    "register_op": "rules",
    "weight_stats": "weights",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: importing the package costs next to nothing."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
