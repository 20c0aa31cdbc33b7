"""Odd tensors for the kernels of the scaler's step, and a step's inputs built from them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ampcompile.kernels.adam import AdamGroup, AdamTensors
from ampcompile.kernels.sgd import SgdGroup, SgdTensors

CHUNK = 16384  # of the C++ kernels
SIZES = (0, 1, 5, 31, 32, 33, 1023, 1025, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 3)
GRAD_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def odd_tensors(sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random tensors of these sizes, each a view that starts at another offset of its storage, and a transposed one."""
    views = [torch.randn(size + i % 7, dtype=torch.float32).to(dtype)[i % 7 :] for i, size in enumerate(sizes)]
    return [*views, torch.randn(37, 53).to(dtype).t()]


def adam_tensors(groups: list[AdamGroup], grad_dtype: torch.dtype = torch.float32, amsgrad: bool = True) -> AdamTensors:
    """Some steps into training; every other parameter has a copy, in turn float16 and bfloat16."""
    params = odd_tensors()
    n = len(params)
    squares = [t.square() for t in odd_tensors()]
    low = (torch.float16, torch.bfloat16)
    return AdamTensors(
        groups,
        params=params,
        grads=odd_tensors(dtype=grad_dtype),
        exp_avgs=odd_tensors(),
        exp_avg_sqs=squares,
        max_exp_avg_sqs=[s * 0.999 if amsgrad and i % 3 else None for i, s in enumerate(squares)],
        steps=[torch.tensor(float(i)) for i in range(n)],
        copies=[torch.full_like(p, torch.nan, dtype=low[i // 2 % 2]) if i % 2 else None for i, p in enumerate(params)],
        group_of=[i % len(groups) for i in range(n)],
    )


def sgd_tensors(groups: list[SgdGroup], grad_dtype: torch.dtype = torch.float32) -> SgdTensors:
    """Some steps into training; every other parameter has a copy."""
    params = odd_tensors()
    return SgdTensors(
        groups,
        params=params,
        grads=odd_tensors(dtype=grad_dtype),
        momentum_buffers=[t if groups[i % len(groups)].momentum else None for i, t in enumerate(odd_tensors())],
        copies=[torch.full_like(p, torch.nan, dtype=torch.bfloat16) if i % 2 else None for i, p in enumerate(params)],
        group_of=[i % len(groups) for i in range(len(params))],
    )


def assert_equal(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """The same bits, NaN included."""
    for a, e in zip(actual, expected, strict=True):
        if a is None or e is None:
            assert a is e
        else:
            torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)


def assert_close(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """Equal up to 1e-6 of the largest element of all."""
    finite = [e.abs().nan_to_num(posinf=0, neginf=0).max() for e in expected if e is not None and e.numel()]
    largest = torch.stack(finite).max().item() if finite else 0.0
    for a, e in zip(actual, expected, strict=True):
        if a is None or e is None:
            assert a is e
        else:
            torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6 * largest, equal_nan=True)
