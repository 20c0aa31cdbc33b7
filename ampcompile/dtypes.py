"""Facts about floating dtypes that every precision decision depends on: names, promotion, lossless casts."""

import math
import re
from collections.abc import Iterable
from typing import Any

import torch

FLOATS: frozenset[torch.dtype] = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""The dtypes autocast casts from and to. float64 is left out on purpose: eager autocast never casts it."""

LOW = (torch.bfloat16, torch.float16)  # the low-precision dtypes
FP8_MULTIPLE = 16  # features of a product of 8-bit floats are a multiple of this: what a GPU reads at a time
FP8 = ("fp8", "fp8_e4m3", "fp8_rowwise")
"""The recipes of products of 8-bit floats, as a policy names them: see `ampcompile.kernels.fp8`."""
NAMES = {
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "f16", "float16", "half"), torch.float16),
    **dict.fromkeys(("fp32", "f32", "float32", "float"), torch.float32),
    **dict.fromkeys(("fp64", "f64", "float64", "double"), torch.float64),
}
"""Names of floating dtypes as options, policies and `precision` accept them, with `torch.` before them too."""

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}

_HALVES = frozenset({torch.float16, torch.bfloat16})
_WIDE = frozenset({torch.float32, torch.float64})
# Each narrow type with the wider ones that represent all of its values, infinities and NaN included.
_HELD_BY: dict[torch.dtype, frozenset[torch.dtype]] = {
    torch.float32: frozenset({torch.float64}),
    **dict.fromkeys((*_HALVES, torch.int16), _WIDE),
    **dict.fromkeys((torch.float8_e5m2, torch.float8_e5m2fnuz), _HALVES | _WIDE),
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e4m3fnuz), _HALVES | _WIDE),
    **dict.fromkeys((torch.bool, torch.int8, torch.uint8), _HALVES | _WIDE),
    torch.float8_e8m0fnu: _WIDE | {torch.bfloat16},
}


def named(value: Any) -> Any:
    """Return the dtype that a string names; anything else as it is."""
    return NAMES.get(value.removeprefix("torch."), value) if isinstance(value, str) else value


_EIGHT_BITS = re.compile("fp8|float8|e4m3|e5m2", re.IGNORECASE)


def hint_at_policy(value: Any) -> str:
    """Return where products of 8 bits are asked for, if that is what an option's name or value means; else ""."""
    if not _EIGHT_BITS.search(str(value)):
        return ""
    return " Ask for products of 8 bits by a policy: options={'policy': 'module blocks.*=fp8'}, or 'op linear=fp8'."


def short_name(dtype: torch.dtype) -> str:
    """Return a dtype as tables print it: `bf16`, `f32`, `i64`, `f8_e4m3fn`, `bool`."""
    name = str(dtype).removeprefix("torch.")
    kind = name.rstrip("0123456789") if "_" not in name else name.partition("8")[0]
    return _SHORT.get(kind, kind) + name.removeprefix(kind)


def is_lossless(src: torch.dtype, dst: torch.dtype) -> bool:
    """Return True if every value of `src` survives a cast to `dst`: numbers unchanged, NaN still some NaN."""
    return src == dst or dst in _HELD_BY.get(src, ())


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """Return the dtype in which autocast's `promote` category runs an op, or None if no dtype is one of `FLOATS`.

    float64 is ignored, as in eager autocast; bfloat16 with float16 gives float32, where eager raises.
    """
    floats = FLOATS.intersection(dtypes)
    return torch.float32 if len(floats) > 1 else next(iter(floats), None)


def first_to_infinity(dtype: torch.dtype) -> float:
    """Return the least magnitude that becomes infinite in an IEEE type of 16 bits or more."""
    info = torch.finfo(dtype)
    return info.max / (2 - info.eps) * (2 - info.eps / 2)


def representable(value: float, dtype: torch.dtype) -> bool:
    """Return True if a Python number survives `dtype` (an IEEE type of 16 bits or more): stays finite, stays nonzero.

    Rounding to the nearest even number is no loss here. Infinities, NaN and zero survive.
    """
    if value == 0 or not math.isfinite(value):
        return True
    info = torch.finfo(dtype)
    last_to_zero = info.smallest_normal * info.eps / 2
    return last_to_zero < abs(value) < first_to_infinity(dtype)
