"""Nested containers of values as torch walks through them, `torch.export`'s registered ones included."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils._pytree import (
    SUPPORTED_NODES,
    arg_tree_leaves,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "arg_tree_leaves",
    "open_registered",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]


def open_registered(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The parts of an object whose very class is registered, and a function that makes one of other parts, or None."""
    if type(value) not in SUPPORTED_NODES:
        return None
    parts, spec = tree_flatten(value, is_leaf=lambda each: each is not value)
    return parts, partial(tree_unflatten, treespec=spec)
