"""One optimizer step under a GradScaler; candidates in turn.

Unscale, check, clip, AdamW, scale update, and the weights' 16-bit copies brought up to date.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from ampcompile.kernels.adam import adam_reference_
from ampcompile.kernels.check_grads import check_grads_reference
from ampcompile.scaler.grad_scaler import GradScaler
from ampcompile.weights import Binding, CopySpec, Form
from benchmarks.architectures import build
from benchmarks.kernel_cases import adam_state
from benchmarks.peers import AMP
from benchmarks.records import Row

ROUNDS = 25
CASE = "clip and AdamW step under a GradScaler"
STOCK = "torch: unscale_, clip_grad_norm_, fused AdamW, update"
RECAST = f"{STOCK}, weights cast"
APEX = "apex-like: 16-bit weights and gradients, float32 masters, fused AdamW"
FOREACH = "torch: unscale_, clip_grad_norm_, foreach AdamW, update"
INDUCTOR = "Inductor: the same arithmetic, compiled"
BYTES = 34
"""Moved for each parameter at least: the gradient twice, weight and two moments read and written, the copy written."""

Params = list[nn.Parameter]


def stock(params: Params, cast: bool = False, **options: Any) -> Callable[[], object]:
    """torch's scaler and optimizer; with `cast`, the copies that autocast would make in the next forward pass."""
    optimizer = torch.optim.AdamW(params, lr=1e-4, **options)
    scaler = torch.amp.GradScaler(params[0].device.type)
    scaler.scale(torch.ones((), device=params[0].device))
    matrices = [param.detach() for param in params if param.dim() > 1]
    copies = [matrix.bfloat16() for matrix in matrices]

    def step() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        if cast:
            torch._foreach_copy_(copies, matrices)

    return step


def masters(params: Params) -> Callable[[], object]:
    """As apex's O2, by torch's multi-tensor kernels: gradients widened for the masters, weights written back."""
    weights, step = [param.detach().bfloat16() for param in params], stock(params, fused=True)
    low = [torch.randn_like(weight) * 2.0**16 for weight in weights]
    grads = [param.grad for param in params if param.grad is not None]

    def step_on_masters() -> None:
        torch._foreach_copy_(grads, low)
        step()
        torch._foreach_copy_(weights, [param.detach() for param in params])

    return step_on_masters


def ours(params: Params) -> Callable[[], object]:
    """Our scaler, with a bfloat16 copy of every matrix in the hands of a compiled graph."""
    optimizer = torch.optim.AdamW(params, lr=1e-4)
    scaler = GradScaler(params[0].device.type)
    scaler.scale(torch.ones((), device=params[0].device))
    matrices = [param for param in params if param.dim() > 1]
    binding = Binding([CopySpec(i, Form(torch.bfloat16)) for i in range(len(matrices))])
    binding.copies(matrices)

    def step() -> object:
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        return binding

    return step


def inductor(params: Params) -> Callable[[], object]:
    """The plain references of our kernels, compiled together."""
    tensors = adam_state([param.detach() for param in params], [])
    tensors.copies = [param.detach().bfloat16() if param.dim() > 1 else None for param in params]
    scale = torch.full((), 2.0**16, device=params[0].device)

    @torch.compile
    def step(grads: list[Tensor]) -> None:
        tensors.grads = grads
        checked = check_grads_reference(grads, scale, None, 1.0)
        adam_reference_(tensors, checked.multiplier, checked.found_inf)

    return lambda: step([param.grad for param in params if param.grad is not None])


CANDIDATES: dict[str, Callable[[Params], Callable[[], object]]] = {
    STOCK: lambda params: stock(params, fused=True),
    RECAST: lambda params: stock(params, cast=True, fused=True),
    APEX: masters,
    FOREACH: lambda params: stock(params, foreach=True),
    INDUCTOR: inductor,
    AMP: ours,
}


def measure(model: str, device: str) -> list[Row]:
    """Seconds of a step in each round. Gradients are filled anew before each, untimed: unscaled again and again they
    would end in denormals, and every figure would triple.
    """
    start = [param.detach().to(device) for param in build(model, 1, 1, False)[0].parameters()]
    source = [torch.randn_like(param) * 2.0**16 for param in start]
    grads = [torch.empty_like(grad) for grad in source]
    steps = {}
    for name in CANDIDATES:
        params = [nn.Parameter(param.clone()) for param in start]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        steps[name] = CANDIDATES[name](params)
    times: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for turn in range(-2, ROUNDS):
        for name in CANDIDATES if turn % 2 else reversed(CANDIDATES):
            torch._foreach_copy_(grads, source)
            seconds = timed(steps[name], device)
            if turn >= 0:
                times[name].append(seconds)
    count = sum(param.numel() for param in start)
    figures = {"parameters": count, "bytes": BYTES * count}
    return [Row(f"{CASE}, {model}", name, {"seconds": times[name], **figures}) for name in CANDIDATES]


def timed(step: Callable[[], object], device: str) -> float:
    """Seconds of one call, the device's work included."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - begin
