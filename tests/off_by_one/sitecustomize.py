"""A CPU whose functions of float32 are off by one in the last digit for every fifth argument, as some machines' are.

What is exact, infinite or NaN stays so, and a result stays in its function's range. Python imports this as it starts,
where PYTHONPATH leads here, as `make test OFF_BY_ONE=1` has it, in subprocesses too. It replaces the CPU's kernels,
below all that graphs see.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.library import Library, get_kernel

LARGEST = {"cos": 1.0, "sin": 1.0, "tanh": 1.0, "exp": np.finfo(np.float32).max}
EXACT_AT = {"log": 1.0}  # the others at 0; sqrt of every square
NAMES = ("cos", "exp", "log", "sin", "sqrt", "tanh")
library = Library("aten", "IMPL")


def seen(x: torch.Tensor) -> np.ndarray:
    with torch._C.DisableTorchFunction():
        return x.detach().numpy()


def wrong(name: str, x: np.ndarray, y: np.ndarray) -> None:
    """Move every fifth result to a neighbour, by turns the one farther from zero and the nearer one."""
    bits = x.view(np.int32)
    exact = y.astype(np.float64) ** 2 == x if name == "sqrt" else x == EXACT_AT.get(name, 0.0)
    moves = (bits % 5 == 0) & np.isfinite(y) & (y != 0) & ~exact
    up = (bits % 10 == 0) & (np.abs(y) < LARGEST.get(name, np.inf))
    y.view(np.int32)[...] += np.where(moves, np.where(up, 1, -1), 0).astype(np.int32)


def off_by_one(name: str, op: str) -> Callable[..., torch.Tensor]:
    kernel = get_kernel(f"aten::{op}", "CPU")

    def call(keys: Any, x: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
        argument = seen(x).copy() if x.dtype == torch.float32 else None
        y = kernel.call_boxed(keys, x, **out)
        if argument is not None and y.dtype == torch.float32:
            wrong(name, argument, seen(y))
        return y

    return call


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that kernels are replaced
    for name in NAMES:
        for op in (name, f"{name}_", f"{name}.out"):
            library.impl(op, off_by_one(name, op), "CPU", with_keyset=True)
