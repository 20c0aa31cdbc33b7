"""How large a value is, as it was traced.

Nothing here asks a symbol for its value, which would add a guard; only for its hint.
"""

from __future__ import annotations

from typing import Any

import torch

from ampcompile.dtypes import FLOATS


def elements_hint(value: Any) -> int | None:
    """The number of elements of a tensor, 1 for anything else; None if it depends on data."""
    # A nested tensor's sizes are those of the rows that it holds, one behind the other.
    sizes = (value.values() if value.is_nested else value).shape if isinstance(value, torch.Tensor) else ()
    return product_hint(*sizes)


def product_hint(*sizes: int | torch.SymInt) -> int | None:
    """The product of sizes as they were traced with; None if one depends on data."""
    product = 1
    for size in sizes:
        if isinstance(size, torch.SymInt):
            if not size.node.has_hint():
                return None
            size = int(size.node.hint)
        product *= size
    return product


def is_smaller(a: Any, b: Any) -> bool:
    """Whether a value has fewer elements than another one, as traced; False if that depends on data."""
    first, second = elements_hint(a), elements_hint(b)
    return first is not None and second is not None and first < second


def is_float_tensor(value: Any) -> bool:
    """Whether a value is a tensor that autocast might cast."""
    return isinstance(value, torch.Tensor) and value.dtype in FLOATS
