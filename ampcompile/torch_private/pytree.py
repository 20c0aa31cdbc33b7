"""Nested containers of values as torch walks through them, `torch.export`'s registered ones included."""

from torch.utils._pytree import (
    arg_tree_leaves,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = ["arg_tree_leaves", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
