"""Nested containers of values as torch walks through them, `torch.export`'s registered ones included."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils._pytree import (
    arg_tree_leaves,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "arg_tree_leaves",
    "open_container",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]


def open_container(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The parts of a registered container, and a function that makes one of other parts; None for other objects."""
    parts, spec = tree_flatten(value, is_leaf=lambda each: each is not value)
    return None if spec.is_leaf() else (parts, partial(tree_unflatten, treespec=spec))
