"""One optimizer step under a GradScaler; candidates in turn, beside what memory allows.

Unscale, check, clip, AdamW, scale update, and the weights' 16-bit copies brought up to date; or 16-bit parameters whose
optimizer keeps masters.
"""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from ampcompile.kernels.adam import adam_reference_
from ampcompile.kernels.check_grads import check_grads_reference
from ampcompile.scaler.grad_scaler import GradScaler
from ampcompile.scaler.master_step import keep_masters
from ampcompile.weights import Binding, CopySpec, Form
from benchmarks.architectures import build
from benchmarks.kernel_cases import adam_state
from benchmarks.memory import forget_peak, peak_bytes
from benchmarks.peers import AMP
from benchmarks.records import Row

ROUNDS = 25
CASE = "clip and AdamW step under a GradScaler"
LIMIT = "what bounds it"
PEAK = "a training step, clipped, 1x16"
STOCK = "torch: unscale_, clip_grad_norm_, fused AdamW, update"
RECAST = f"{STOCK}, weights cast"
APEX = "apex-like: 16-bit weights and gradients, float32 masters, fused AdamW"
FOREACH = "torch: unscale_, clip_grad_norm_, foreach AdamW, update"
INDUCTOR = "Inductor: the same arithmetic, compiled"
READ = "torch: sum of the gradients"
UPDATE = "torch: fused AdamW"
KEPT = f"{AMP}, 16-bit parameters: {{}}"
REMAINDER = KEPT.format("remainder")
MOVED = {
    REMAINDER: (2, 26),
    KEPT.format("remainder, float32 gradients"): (4, 28),
    KEPT.format("float32"): (2, 30),
    KEPT.format("stochastic"): (2, 22),
}
"""Bytes for each parameter that the norm and the update move at least, of 16-bit parameters."""
WITH_COPY = 4, 30
"""The same of float32 parameters: the gradient; it again, weight and two moments read and written, the copy written."""
FUSED = 28
"""Bytes that torch's fused AdamW moves."""

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
    matrices = [param for param in params if param.dim() > 1]
    binding = Binding([CopySpec(i, Form(torch.bfloat16)) for i in range(len(matrices))])
    binding.copies(matrices)
    step = scaled_step(torch.optim.AdamW(params, lr=1e-4))
    return lambda: (step(), binding)


def kept(params: Params, how: str = "remainder", wide_grads: bool = False) -> Callable[[], object]:
    """Our scaler on bfloat16 parameters with masters; gradients are bfloat16 too, or float32."""
    weights = [nn.Parameter(param.detach().bfloat16()) for param in params]
    for weight, param in zip(weights, params, strict=True):
        if wide_grads:
            weight.grad_dtype = torch.float32
            weight.grad = param.grad
        else:
            weight.grad = (torch.randn_like(param) * 2.0**16).bfloat16()
    optimizer = torch.optim.AdamW(weights, lr=1e-4)
    keep_masters(optimizer, how)
    return scaled_step(optimizer)


def scaled_step(optimizer: torch.optim.Optimizer, enabled: bool = True) -> Callable[[], None]:
    """Clipping and a step by our scaler."""
    device = optimizer.param_groups[0]["params"][0].device
    scaler = GradScaler(device.type, enabled=enabled)
    scaler.scale(torch.ones((), device=device))

    def step() -> None:
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

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
    REMAINDER: kept,
    KEPT.format("remainder, float32 gradients"): partial(kept, wide_grads=True),
    KEPT.format("float32"): partial(kept, how="float32"),
    KEPT.format("stochastic"): partial(kept, how="stochastic"),
}


def read(params: Params) -> Callable[[], object]:
    """The rate at which memory is read: one sum of as many numbers as the gradients have."""
    numbers = torch.cat([param.detach().flatten() for param in params])
    return lambda: numbers.sum()


LIMITS: dict[str, Callable[[Params], Callable[[], object]]] = {
    READ: read,
    UPDATE: lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True).step,
}


def measure(model: str, device: str, compiled: bool = True) -> list[Row]:
    """Seconds of a step in each round; `compiled`: of Inductor's code too, which takes minutes to compile.

    Gradients are filled anew before each, untimed: unscaled again and again they would end in denormals, and every
    figure would triple.
    """
    start = [param.detach().to(device) for param in build(model, 1, 1, False)[0].parameters()]
    source = [torch.randn_like(param) * 2.0**16 for param in start]
    grads = [torch.empty_like(grad) for grad in source]
    steps = {}
    candidates = {name: make for name, make in CANDIDATES.items() if compiled or name != INDUCTOR}
    for name, make in {**LIMITS, **candidates}.items():
        params = [nn.Parameter(param.clone()) for param in start]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        steps[name] = make(params)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-2, ROUNDS):
        for name in steps if turn % 2 else reversed(steps):
            torch._foreach_copy_(grads, source)
            seconds = timed(steps[name], device)
            if turn >= 0:
                times[name].append(seconds)
    count = sum(param.numel() for param in start)
    limits = {READ: 4, UPDATE: FUSED}
    rows = [Row(f"{LIMIT}, {model}", name, {"seconds": times[name], "bytes": limits[name] * count}) for name in LIMITS]
    for name in candidates:
        norm, update = MOVED.get(name, WITH_COPY)
        bound = [norm / 4 * r + update / FUSED * u for r, u in zip(times[READ], times[UPDATE], strict=True)]
        figures = {"parameters": count, "bytes": (norm + update) * count, "bound_seconds": bound}
        rows.append(Row(f"{CASE}, {model}", name, {"seconds": times[name], **figures}))
    return rows


def peak(model: str, device: str, masters: bool) -> list[Row]:
    """The most memory of training steps with clipping and AdamW: with float32 parameters, or remainders of 16-bit ones.

    One sequence of 16 tokens, so that weights count and not activations.
    """
    network, inputs = build(model, 1, 16, True)
    network.to(device, torch.bfloat16 if masters else torch.float32)
    inputs = tuple(each.to(device) for each in inputs)
    compiled = torch.compile(network, backend="amp")
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    if masters:
        keep_masters(optimizer)
    update = scaled_step(optimizer, enabled=False)

    def step() -> None:
        optimizer.zero_grad()
        compiled(*inputs).backward()
        update()

    for _ in range(2):
        step()
    forget_peak(device)
    seconds = [timed(step, device) for _ in range(3)]
    figures = {"seconds": seconds, "peak_bytes": peak_bytes(device)}
    return [Row(f"{PEAK}, {model}", REMAINDER if masters else AMP, figures)]


def timed(step: Callable[[], object], device: str) -> float:
    """Seconds of one call, the device's work included."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - begin
