"""How large a value is: as an expression in the graph's own symbols, and as the number it was traced with.

Nothing here asks a symbol for its value, which would add a guard; only for its hint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from ampcompile.dtypes import FLOATS


def _sizes(value: Any) -> Sequence[int | torch.SymInt]:
    """What to multiply: a nested tensor's sizes are those of the rows that it holds, one behind the other."""
    if not isinstance(value, torch.Tensor):
        return ()
    return (value.values() if value.is_nested else value).shape


def elements(value: Any) -> sympy.Expr:
    """The number of elements of a tensor, 1 for anything else."""
    product: sympy.Expr = sympy.Integer(1)
    for size in _sizes(value):
        product *= size.node.expr if isinstance(size, torch.SymInt) else size
    return product


def elements_hint(value: Any) -> int | None:
    """The same as the number it was traced with; None if it depends on data."""
    return product_hint(*_sizes(value))


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
