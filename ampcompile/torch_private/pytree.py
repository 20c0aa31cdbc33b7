"""Nested containers of values as torch walks through them, `torch.export`'s registered ones included."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES
from torch.utils._pytree import arg_tree_leaves as arg_tree_leaves
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors in some containers, in order."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def is_registered(kind: type) -> bool:
    """Return True for a class that is registered itself."""
    return kind in SUPPORTED_NODES


def open_registered(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The parts of an object whose very class is registered, and a function that makes one of other parts, or None."""
    if not is_registered(type(value)):
        return None
    parts, spec = tree_flatten(value, is_leaf=lambda part: part is not value)
    return parts, partial(tree_unflatten, treespec=spec)
