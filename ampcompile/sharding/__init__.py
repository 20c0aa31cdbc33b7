"""FSDP2's gathers in 16 bits, for the weights that all readers read in 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decide import shard_policy

__all__ = ["shard_policy"]


def __getattr__(name: str) -> Any:
    if name != "shard_policy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .decide import shard_policy  # it imports torch.distributed.fsdp, and what compiles must not

    return shard_policy
