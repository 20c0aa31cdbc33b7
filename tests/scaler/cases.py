"""What the tests of the scaler share: optimizers to step, odd tensors for the kernels, comparisons."""

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ampcompile.kernels.adam import AdamGroup, AdamTensors, adam_
from ampcompile.kernels.fp8 import buffer_like, quantize_many_reference_
from ampcompile.kernels.masters import write_master
from ampcompile.kernels.sgd import SgdGroup, SgdTensors, sgd_
from ampcompile.kernels.tables import SPAN
from ampcompile.optim.fused_step import step_of
from ampcompile.scaler.grad_scaler import GradScaler
from tests.compiling import bits
from tests.kernels.references import adam_reference_, sgd_reference_

CHUNK = 16384  # of the C++ kernels
SIZES = (0, 1, 5, 31, 32, 33, 1023, 1025, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 3)
MATRICES = ((32, 48), (16, 16), (48, 80), (16, 32), (32, 16), (16, 16), (16, 48), (80, 16))
MATRIX_SIZES = (*(rows * columns for rows, columns in MATRICES), 5)
GRAD_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def odd_tensors(dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = SIZES) -> list[Tensor]:
    """Random tensors of these sizes, each a view that starts at another offset of its storage, and a transposed one."""
    views = [torch.randn(size + i % 7, dtype=torch.float32).to(dtype)[i % 7 :] for i, size in enumerate(sizes)]
    return [*views, torch.randn(7, 9).to(dtype).t()]


def adam_tensors(
    groups: list[AdamGroup],
    grad_dtype: torch.dtype = torch.float32,
    amsgrad: bool = True,
    sizes: tuple[int, ...] = SIZES,
) -> AdamTensors:
    """Some steps into training; every other parameter has a copy, in turn float16 and bfloat16."""
    params = odd_tensors(sizes=sizes)
    n = len(params)
    squares = [t.square() for t in odd_tensors(sizes=sizes)]
    low = (torch.float16, torch.bfloat16)
    return AdamTensors(
        groups,
        params=params,
        grads=odd_tensors(grad_dtype, sizes),
        exp_avgs=odd_tensors(sizes=sizes),
        exp_avg_sqs=squares,
        max_exp_avg_sqs=[s * 0.999 if amsgrad and i % 3 else None for i, s in enumerate(squares)],
        steps=[torch.tensor(float(i)) for i in range(n)],
        copies=[torch.full_like(p, torch.nan, dtype=low[i // 2 % 2]) if i % 2 else None for i, p in enumerate(params)],
        group_of=[i % len(groups) for i in range(n)],
    )


def sgd_tensors(
    groups: list[SgdGroup], grad_dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = SIZES
) -> SgdTensors:
    """Some steps into training; every other parameter has a copy."""
    params, buffers = odd_tensors(sizes=sizes), odd_tensors(sizes=sizes)
    return SgdTensors(
        groups,
        params=params,
        grads=odd_tensors(grad_dtype, sizes),
        momentum_buffers=[b if groups[i % len(groups)].momentum else None for i, b in enumerate(buffers)],
        copies=[torch.full_like(p, torch.nan, dtype=torch.bfloat16) if i % 2 else None for i, p in enumerate(params)],
        group_of=[i % len(groups) for i in range(len(params))],
    )


ADAM_GROUPS = [
    AdamGroup(0.01, 0.9, 0.99, 1e-3, weight_decay, decoupled, maximize)
    for weight_decay, decoupled, maximize in product((0.0, 0.1), (False, True), (False, True))
]
ADAM_GROUPS += [
    AdamGroup(0.01, beta1, beta2, 1e-3, 0.1, True, False) for beta1, beta2 in ((0.0, 0.0), (0.3, 0.5), (0.5, 0.0))
]
SGD_GROUPS = [
    SgdGroup(0.1, 0.0, 0.0, False, 0.0, False),
    SgdGroup(0.1, 0.0, 0.0, False, 0.1, True),
    SgdGroup(0.1, 0.9, 0.0, False, 0.1, False),
    SgdGroup(0.1, 0.9, 0.0, True, 0.0, False),
    SgdGroup(0.1, 0.9, 0.0, True, 0.1, True),
    SgdGroup(0.1, 0.9, 0.5, False, 0.1, True),
]
OPTIMIZERS: dict[str, Any] = {
    "adam": (adam_tensors, ADAM_GROUPS, adam_, adam_reference_),
    "sgd": (sgd_tensors, SGD_GROUPS, sgd_, sgd_reference_),
}
"""What makes their tensors, groups of parameters, the step, and the same in plain torch."""
HOWS = [
    *(("remainder", torch.bfloat16), ("float32", torch.bfloat16)),
    *(("float32", torch.float16), ("stochastic", torch.bfloat16)),
]
"""Ways to keep masters, each with a parameter's type."""

Tensors = TypeVar("Tensors", AdamTensors, SgdTensors)


def with_masters(tensors: Tensors, how: str, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """The same tensors, but 16-bit parameters that keep the precision of the float32 ones; no copies."""
    sizes = tuple(p.numel() for p in tensors.params[:-1])
    params, n = odd_tensors(dtype, sizes), len(tensors.params)
    kept: list[Tensor] = [torch.tensor([2**40 + 7, number, 5]) for number in range(n)]
    checksums: list[Tensor | None] = [None] * n
    if how != "stochastic":
        kept = [t.to(torch.int16) if how == "remainder" else t for t in odd_tensors(sizes=sizes)]
    if how == "remainder":
        checksums = [torch.zeros(-(-p.numel() // SPAN), dtype=torch.int32) for p in params]
    for param, beside, sums, master in zip(params, kept, checksums, tensors.params, strict=True):
        write_master(param, beside, sums, master)
    return replace(deepcopy(tensors), params=params, kept=kept, checksums=checksums, copies=[None] * n)


def quantized(weight: Tensor) -> Tensor:
    """Its buffer, filled in plain torch."""
    buffer = buffer_like(weight)
    quantize_many_reference_([buffer], [weight])
    return buffer


def with_quantized(tensors: Tensors) -> Tensors:
    """Make matrices of tensors of `MATRIX_SIZES`, and quantize them; some are then written, to other magnitudes."""
    for held in vars(tensors).values():
        for i, (rows, columns) in enumerate(MATRICES[: len(held)]):
            if isinstance(held[i], Tensor) and held[i].numel() == rows * columns:
                held[i] = held[i].view(rows, columns)
    params = tensors.params
    params[0].clamp_(-2.5, 2.5)  # in the middle of what is quantized alike, where small steps leave it
    if isinstance(tensors, AdamTensors):
        tensors.exp_avg_sqs[0].fill_(1.0)
    tensors.quantized = {i: (quantized(params[i]), params[i]) for i in range(len(MATRICES))}
    for param, factor in zip(params, (1, 2.0**20, 2.0**-20, 0.0), strict=False):
        param.mul_(factor)
    params[4][3, 5], params[5][1, 2] = torch.inf, torch.nan
    return tensors


def assert_quantized(params: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    """Buffers hold the bits of quantizing the parameters now."""
    for buffer, param in zip(buffers, params, strict=True):
        used = slice(2 * param.numel() + 8)
        assert_equal([buffer[used].view(torch.uint8)], [quantized(param)[used].view(torch.uint8)])


def assert_equal(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """The same bits, NaN included."""
    for a, e in zip(actual, expected, strict=True):
        if a is None or e is None:
            assert a is e
        else:
            assert a.dtype == e.dtype
            if not _alike(bits(a), bits(e)):
                torch.testing.assert_close(bits(a), bits(e), rtol=0, atol=0)


def assert_close(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """Equal up to 1e-6 of the largest element of all."""
    for a, e in zip(actual, expected, strict=True):
        if a is None or e is None:
            assert a is e
        elif not _alike(a, e):
            finite = [t.abs().nan_to_num(posinf=0, neginf=0).max() for t in expected if t is not None and t.numel()]
            largest = torch.stack(finite).max().item() if finite else 0.0
            torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6 * largest, equal_nan=True)


def _alike(a: Tensor, e: Tensor) -> bool:
    """A quick look, as most are: torch's comparison takes fifty times as long."""
    return (a.dtype, a.device, a.shape) == (e.dtype, e.device, e.shape) and torch.equal(a, e)


KINDS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda params: torch.optim.SGD(params, lr=0.1),
    lambda params: torch.optim.AdamW(params, lr=0.1),
    lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    lambda params: torch.optim.RMSprop(params, lr=0.1),
    lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
]
"""Optimizers for the fused path, for the generic one, and for the generic one of optimizers that skip by themselves."""


def scaled(kind: Any = GradScaler, device: str = "cpu", **options: Any) -> Any:
    """A scaler, of ours or torch's, that has scaled a loss."""
    scaler = kind(device, **options)
    scaler.scale(torch.ones((), device=device))
    return scaler


def pending(optimizer: Any) -> Any:
    """The clipping that waits for the optimizer's step, or None."""
    return getattr(step_of(optimizer), "pending", None)


def fill(params: Sequence[Tensor], seed: int, scale: float = 1.0, bad: float | None = None) -> None:
    """Gradients laid out as the weights, in place where there are some; `bad`: the last number of the first."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.empty_like(param).detach() if param.grad is None else param.grad
        param.grad.copy_(torch.randn(param.shape, generator=generator) * scale)
    if bad is not None:
        first = params[0].grad
        assert first is not None
        first[-1, -1] = bad


def params_with(*grads: float | None) -> list[nn.Parameter]:
    """A parameter of ones for each gradient of that value."""
    params = [nn.Parameter(torch.ones(3)) for _ in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else torch.full((3,), grad)
    return params


def params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Those of its first group."""
    return optimizer.param_groups[0]["params"]


def all_params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Those of all groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def iterate(scaler: GradScaler, optimizer: torch.optim.Optimizer, grad: float) -> None:
    """Step and update with gradients of that value."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, grad)
    scaler.step(optimizer)
    scaler.update()


def counts(train: Any) -> list[tuple[int, int]]:
    """How many calls of each form of a captured step ran as they are, and how many replayed a graph, by its text."""
    found = re.findall(r": (\d+) replays, (\d+) as it is", repr(train))
    return [(int(as_it_is), int(replays)) for replays, as_it_is in found]


def replays_of(train: Any) -> int:
    """How many calls of a captured step replayed a graph."""
    return sum(replays for _, replays in counts(train))
