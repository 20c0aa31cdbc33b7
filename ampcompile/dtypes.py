"""Facts about floating dtypes that every precision decision rests on: names, widening, what survives a cast."""

import math
from collections.abc import Iterable

import torch

FLOATS: frozenset[torch.dtype] = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""The dtypes autocast may cast from. float64 is missing on purpose: eager autocast never casts it."""

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3fn",
    torch.float8_e4m3fnuz: "f8e4m3fnuz",
    torch.float8_e5m2: "f8e5m2",
    torch.float8_e5m2fnuz: "f8e5m2fnuz",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex32: "c32",
    torch.complex64: "c64",
    torch.complex128: "c128",
}

# Every finite, infinite and NaN value of the key also exists in each dtype of the set (NaN stays some NaN).
# The fnuz types have no infinity and no negative zero, e4m3fn no infinity: nothing wider narrows to them.
_WIDER: dict[torch.dtype, frozenset[torch.dtype]] = {
    torch.float64: frozenset(),
    torch.float32: frozenset({torch.float64}),
    torch.float16: frozenset({torch.float32, torch.float64}),
    torch.bfloat16: frozenset({torch.float32, torch.float64}),
    torch.float8_e5m2: frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
    torch.float8_e5m2fnuz: frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
    torch.float8_e4m3fn: frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
    torch.float8_e4m3fnuz: frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
}


def short_name(dtype: torch.dtype) -> str:
    """A dtype as it is printed in tables: `bf16`, `f32`, `i64`; torch's own name where there is no short one."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def is_lossless(src: torch.dtype, dst: torch.dtype) -> bool:
    """Whether every value of `src` survives a cast to `dst` unchanged, infinities and NaN included."""
    return src == dst or dst in _WIDER.get(src, frozenset())


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """The dtype that autocast's `promote` category runs in, or None if no dtype is one of `FLOATS`.

    float64 is passed over, as eager autocast does; bfloat16 with float16 gives float32, where eager raises.
    """
    found = FLOATS.intersection(dtypes)
    if len(found) < 2:
        return next(iter(found), None)
    return torch.float32


def representable(value: float, dtype: torch.dtype) -> bool:
    """Whether a Python scalar survives `dtype`: a finite value stays finite, a nonzero one stays nonzero.

    Rounding is no loss here; NaN and infinities survive wherever the dtype has them.
    """
    cast = float(torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype))
    if math.isnan(value):
        return math.isnan(cast)
    if math.isinf(value):
        return cast == value
    return math.isfinite(cast) and (cast != 0.0 or value == 0.0)
