"""Facts about floating dtypes on which precision decisions rest: names, widening, values that survive a cast."""

import math
from collections.abc import Iterable

import torch

FLOATS: frozenset[torch.dtype] = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""The dtypes autocast casts from and to. float64 is not among them, because eager autocast never casts it."""

LOW = (torch.bfloat16, torch.float16)
"""The low-precision types."""
LOW_NAMES = {
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "f16", "float16", "half"), torch.float16),
}
"""Their names, as options spell them."""

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}

# For each narrow type the wider types that hold all of its values, infinities and NaN included.
_HELD_BY: dict[torch.dtype, frozenset[torch.dtype]] = {
    torch.float32: frozenset({torch.float64}),
    torch.float16: frozenset({torch.float32, torch.float64}),
    torch.bfloat16: frozenset({torch.float32, torch.float64}),
    torch.float8_e5m2: frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
    torch.float8_e5m2fnuz: frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
    torch.float8_e4m3fn: frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
    torch.float8_e4m3fnuz: frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
    torch.float8_e8m0fnu: frozenset({torch.bfloat16, torch.float32, torch.float64}),
    torch.bool: frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
    torch.int8: frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
    torch.uint8: frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
    torch.int16: frozenset({torch.float32, torch.float64}),
}


def short_name(dtype: torch.dtype) -> str:
    """A dtype as tables print it: `bf16`, `f32`, `i64`, `f8_e4m3fn`, `bool`."""
    name = str(dtype).removeprefix("torch.")
    kind = name.rstrip("0123456789") if "_" not in name else name.partition("8")[0]
    return _SHORT.get(kind, kind) + name.removeprefix(kind)


def is_lossless(src: torch.dtype, dst: torch.dtype) -> bool:
    """True if every value of `src` survives a cast to `dst`: numbers stay equal, a NaN stays a NaN."""
    return src == dst or dst in _HELD_BY.get(src, ())


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """The dtype in which autocast's `promote` category runs an op, or None if no dtype is one of `FLOATS`.

    float64 is ignored, as in eager autocast; bfloat16 with float16 gives float32, where eager raises.
    """
    floats = FLOATS.intersection(dtypes)
    return torch.float32 if len(floats) > 1 else next(iter(floats), None)


def representable(value: float, dtype: torch.dtype) -> bool:
    """True if a Python number survives `dtype` (an IEEE type of 16 bits or more): finite stays finite, nonzero nonzero.

    Rounding doesn't count as a loss. Infinities and NaN survive.
    """
    if value == 0 or not math.isfinite(value):
        return True
    info = torch.finfo(dtype)
    first_to_infinity = info.max / (2 - info.eps) * (2 - info.eps / 2)
    last_to_zero = info.smallest_normal * info.eps / 2
    return last_to_zero < abs(value) < first_to_infinity
