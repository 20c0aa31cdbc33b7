"""Rounding to 16 bits inside a kernel, to the nearest, ties to even."""

import os

import triton
import triton.language as tl

from .cast_many import rounded

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def narrowed(x, TO: tl.constexpr):
    """float32 in a type: one instruction on a GPU, by integers in the interpreter, which truncates."""
    if INTERPRETED:
        return rounded(x, TO)
    return x.to(TO)
