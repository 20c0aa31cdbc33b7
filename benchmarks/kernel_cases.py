"""Single kernels, ours and the nearest there is, on the tensors of a GPT; and what the machine itself can do."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ampcompile.kernels.adam import AdamGroup, AdamTensors, adam_, adam_reference_
from ampcompile.kernels.check_grads import check_grads, check_grads_reference
from ampcompile.kernels.linear_cast import linear_cast, linear_cast_reference
from ampcompile.kernels.unscale import unscale_, unscale_reference_
from benchmarks.architectures import build
from benchmarks.peers import AMP
from benchmarks.records import Row

ROUNDS = 9
SECONDS = 0.1
"""How long a round of one candidate lasts, at least."""
LIGER = "Liger-Kernel"
COMPILED = "Inductor"
"""The kernel's plain reference, compiled."""


@dataclass(frozen=True)
class Kernel:
    """What one call must move and compute at least, and who can do it."""

    name: str
    bytes: int
    flops: int
    candidates: dict[str, Callable[[], object]]
    unable: dict[str, str] = field(default_factory=dict)
    """Who can't do it here, and why."""


def limits(device: str) -> Iterator[Kernel]:
    """Copying, and multiplying matrices."""
    elements = 2**26 if device == "cpu" else 2**29
    source, target = torch.ones(elements, device=device), torch.empty(elements, device=device)
    yield Kernel("copy", 8 * elements, 0, {"torch": partial(target.copy_, source)})
    side = 2048 if device == "cpu" else 8192
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(2, side, side, device=device, dtype=dtype)
        name = f"matrix product, {str(dtype).removeprefix('torch.')}"
        yield Kernel(name, 3 * side * side * a.itemsize, 2 * side**3, {"torch": partial(torch.mm, a, b)})


def step_kernels(model: str, device: str) -> Iterator[Kernel]:
    """The kernels of the scaler's step, with all parameters of a model at once."""
    params = [p.detach().to(device) for p in build(model, 1, 1, False)[0].parameters()]
    grads = [torch.randn_like(p) for p in params]
    count = sum(p.numel() for p in params)
    one, found_inf, scale = torch.ones(1, device=device), torch.zeros(1, device=device), torch.ones((), device=device)
    workspace: dict[str, Any] = {}
    yield Kernel(
        "check and norm of gradients",
        4 * count,
        3 * count,
        {
            AMP: lambda: check_grads(grads, scale, None, 1.0, workspace),
            COMPILED: _compiled(check_grads_reference, grads, scale, None, 1.0),
            "torch: get_total_norm": lambda: torch.nn.utils.get_total_norm(grads),
        },
    )
    flip = -one  # repeated division would drive the gradients into denormals, and one changes nothing
    yield Kernel(
        "unscale gradients",
        8 * count,
        count,
        {
            AMP: lambda: unscale_(grads, flip, found_inf, workspace),
            COMPILED: _compiled(unscale_reference_, grads, flip, found_inf),
            "torch: foreach": lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, flip),
        },
    )
    ours, theirs = _adam_state(params, grads), _adam_state(params, grads)
    yield Kernel(
        "AdamW",
        28 * count,
        16 * count,
        {
            AMP: lambda: adam_(ours, one, found_inf, workspace),
            COMPILED: _compiled(adam_reference_, theirs, one, found_inf),
            "torch: fused": _torch_adamw(params, grads).step,
        },
    )


def linear_kernels(device: str) -> Iterator[Kernel]:
    """A linear layer whose float32 weight is cast in every call: few rows, then many, then with the backward."""
    features = 1024 if device == "cpu" else 8192
    weight, bias = torch.randn(features, features, device=device), torch.randn(features, device=device)
    unable = {AMP: "the kernel is one for GPUs: on the CPU it is its reference"} if device == "cpu" else {}
    for rows in (1, 16, 512 if device == "cpu" else 8192):
        x = torch.randn(rows, features, device=device, dtype=torch.bfloat16)
        candidates: dict[str, Callable[[], object]] = {} if unable else {AMP: partial(linear_cast, x, weight, bias)}
        candidates[COMPILED] = _compiled(linear_cast_reference, x, weight, bias)
        bytes_moved = 4 * weight.numel() + 4 * x.numel()
        yield Kernel(f"linear, weight cast, {rows} rows", bytes_moved, 2 * rows * weight.numel(), candidates, unable)
    leaves = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    upstream = torch.randn_like(x)

    def trained(layer: Callable[..., Tensor]) -> None:
        torch.autograd.grad(layer(*leaves), leaves, upstream)

    candidates = {} if unable else {AMP: partial(trained, linear_cast)}
    candidates[COMPILED] = partial(trained, torch.compile(linear_cast_reference))
    bytes_moved = (
        12 * weight.numel() + 12 * x.numel()
    )  # the weight twice and its gradient; x, the result, the gradients
    name = f"linear, weight cast, {rows} rows, with its backward"
    yield Kernel(name, bytes_moved, 6 * rows * weight.numel(), candidates, unable)


def _adam_state(params: list[Tensor], grads: list[Tensor]) -> AdamTensors:
    group = AdamGroup(3e-4, 0.9, 0.999, 1e-8, 0.01, decoupled_weight_decay=True, maximize=False)
    zeros = lambda: [torch.zeros_like(p) for p in params]  # noqa: E731
    return AdamTensors(
        groups=[group],
        params=[p.clone() for p in params],
        grads=grads,
        exp_avgs=zeros(),
        exp_avg_sqs=zeros(),
        max_exp_avg_sqs=[None] * len(params),
        steps=[torch.zeros((), device=p.device) for p in params],
        copies=[None] * len(params),
        group_of=[0] * len(params),
    )


def _torch_adamw(params: list[Tensor], grads: list[Tensor]) -> torch.optim.Optimizer:
    weights = [p.clone().requires_grad_() for p in params]
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad
    return torch.optim.AdamW(weights, lr=3e-4, fused=True)


def _compiled(reference: Callable[..., object], *args: Any) -> Callable[[], object]:
    compiled = torch.compile(reference)
    return lambda: compiled(*args)


def measure(make: Callable[..., Iterator[Kernel]], *args: Any) -> list[Row]:
    """Rows of every kernel that `make(*args)` gives, its candidates timed in turn."""
    return [row for kernel in make(*args) for row in _measured(kernel)]


def _measured(kernel: Kernel) -> list[Row]:
    def seconds(call: Callable[[], object], calls: int) -> float:
        start = perf_counter()
        for _ in range(calls):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return (perf_counter() - start) / calls

    calls = {}
    for name, call in kernel.candidates.items():
        seconds(call, 2)
        calls[name] = 1 + int(SECONDS / seconds(call, 1))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in kernel.candidates.items():
            times[name].append(seconds(call, calls[name]))
    must = {"bytes": kernel.bytes, "flops": kernel.flops}
    return [
        *(Row(kernel.name, name, {"seconds": seconds, **must}) for name, seconds in times.items()),
        *(Row(kernel.name, name, why=why) for name, why in kernel.unable.items()),
    ]
