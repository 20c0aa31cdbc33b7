"""Constants that a low-precision type turns into infinity: found here, kept out of it by `assign_precision`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

_SCALAR = ("number", "Optional[number]", "float", "Optional[float]")
_COMPARISONS = frozenset(f"aten::{op}" for op in ("eq", "ne", "lt", "le", "gt", "ge"))  # in float32 anyway


def out_of_range(
    op: OpOverload, arguments: Mapping[str, Any], dtype: torch.dtype | None
) -> tuple[str, float, float] | None:
    """The first finite Python constant of a call that `dtype` can't hold: (its name, it, the nearest number held).

    None where there is none, or where `dtype` is no 16-bit float.
    """
    if dtype not in (torch.float16, torch.bfloat16) or op._schema.name in _COMPARISONS:
        return None
    largest = torch.finfo(dtype).max
    for argument in op._schema.arguments:
        value = arguments.get(argument.name)
        if isinstance(value, bool) or not isinstance(value, int | float) or str(argument.type) not in _SCALAR:
            continue
        if math.isfinite(value) and abs(value) > largest:
            return argument.name, float(value), math.copysign(largest, value)
    return None
