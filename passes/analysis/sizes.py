"""Sizes of values, as traced.

These functions read only the hint of a symbol: reading its value would add a guard.
"""

from typing import Any

import torch

from ampcompile.dtypes import FLOATS


def elements_hint(value: Any) -> int | None:
    """The number of elements of a tensor, 1 for anything else; None if it depends on data."""
    # The size of a nested tensor is that of `values()`, which holds its rows one behind the other.
    sizes = (value.values() if value.is_nested else value).shape if isinstance(value, torch.Tensor) else ()
    return product_hint(*sizes)


def product_hint(*sizes: int | torch.SymInt) -> int | None:
    """The product of sizes, as traced; None if one depends on data."""
    product = 1
    for size in sizes:
        if isinstance(size, torch.SymInt):
            if not size.node.has_hint():
                return None
            size = int(size.node.hint)
        product *= size
    return product


def is_float_tensor(value: Any) -> bool:
    """True if a value is a tensor that autocast might cast."""
    return isinstance(value, torch.Tensor) and value.dtype in FLOATS
