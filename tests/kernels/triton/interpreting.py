"""Triton's interpreter where it differs from a GPU in numbers, put right."""

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

CAST = interpreter.InterpreterBuilder.cast_impl
PATCH_TENSOR = interpreter._patch_lang_tensor


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16: products of numbers, not of the integers that hold them; float32 rounded to it, not truncated.

    e4m3: float32 rounded to the nearest, and at most to 448.

    Triton 3.6, of torch 2.11: a loop's bound may be an argument under NumPy 2.4, too.
    """
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
    for name in ("cast_impl", "create_fp_trunc"):
        monkeypatch.setattr(interpreter.InterpreterBuilder, name, _cast)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_to_fp", _to_8_bits)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", _patch_tensor)


def _dot(builder: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    found = np.matmul(_numbers(a), _numbers(b), dtype=np.float32) + d.data
    return interpreter.TensorHandle(found, d.dtype.scalar)


def _numbers(handle: Any) -> Any:
    is_bfloat16 = handle.dtype.scalar == tl.bfloat16
    return (handle.data.astype(np.uint32) << 16).view(np.float32) if is_bfloat16 else handle.data


def _cast(builder: Any, source: Any, to: Any) -> Any:
    if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
        return CAST(builder, source, to)
    values = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
    return interpreter.TensorHandle(values.view(torch.uint16).numpy(), tl.bfloat16)


def _to_8_bits(builder: Any, source: Any, to: Any, rounding: Any) -> Any:
    assert (source.dtype.scalar, to.scalar) == (tl.float32, tl.float8e4nv)
    values = torch.from_numpy(np.ascontiguousarray(source.data)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return interpreter.TensorHandle(values.view(torch.uint8).numpy(), tl.float8e4nv)


def _patch_tensor(tensor: Any, scope: Any) -> None:
    PATCH_TENSOR(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
