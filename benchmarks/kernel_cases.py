"""Single kernels, ours and the nearest there is, on the tensors of a GPT; and what the machine itself can do."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ampcompile.kernels import attention_backward
from ampcompile.kernels.adam import AdamGroup, AdamTensors, adam_, adam_reference_
from ampcompile.kernels.check_grads import check_grads, check_grads_reference
from ampcompile.kernels.linear_cast import linear_cast, linear_cast_reference
from ampcompile.kernels.unscale import unscale_, unscale_reference_
from benchmarks.apart import in_one_line
from benchmarks.architectures import build
from benchmarks.memory import extra_bytes
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
    """A kernel: the least that one call must move and compute, and the peers that can run it."""

    name: str
    bytes: int
    flops: int
    candidates: dict[str, Callable[[], object]]
    unable: dict[str, str] = field(default_factory=dict)
    """The peers that can't run it here, and why."""


def limits(device: str) -> Iterator[Kernel]:
    """Copying, and multiplying matrices."""
    elements = 2**26 if device == "cpu" else 2**29
    source, target = torch.randn(elements, device=device), torch.empty(elements, device=device)
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
            COMPILED: compiled(check_grads_reference, grads, scale, None, 1.0),
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
            COMPILED: compiled(unscale_reference_, grads, flip, found_inf),
            "torch: foreach": lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, flip),
        },
    )
    ours, theirs = adam_state(params, grads), adam_state(params, grads)
    yield Kernel(
        "AdamW",
        28 * count,
        16 * count,
        {
            AMP: lambda: adam_(ours, one, found_inf, workspace),
            COMPILED: compiled(adam_reference_, theirs, one, found_inf),
            "torch: fused": _torch_adamw(params, grads).step,
        },
    )


def linear_kernels(device: str) -> Iterator[Kernel]:
    """A linear layer whose float32 weight is cast in every call: few rows, then many, then with the backward."""
    features = 1024 if device == "cpu" else 8192
    weight, bias = torch.randn(features, features, device=device), torch.randn(features, device=device)
    for rows in (1, 16, 512) if device == "cpu" else (1, 16, 64, 256, 8192):
        x = torch.randn(rows, features, device=device, dtype=torch.bfloat16)
        given = x, weight, bias
        candidates = {AMP: compiled(linear_cast, *given), COMPILED: compiled(linear_cast_reference, *given)}
        bytes_moved = 4 * weight.numel() + 4 * x.numel()
        yield Kernel(f"linear, weight cast, {rows} rows", bytes_moved, 2 * rows * weight.numel(), candidates)
    leaves = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    upstream = torch.randn_like(x)
    candidates = {
        AMP: trained(linear_cast, leaves, upstream),
        COMPILED: trained(linear_cast_reference, leaves, upstream),
    }
    bytes_moved = 12 * weight.numel() + 12 * x.numel()  # the weight twice, its gradient; x, the result, the gradients
    name = f"linear, weight cast, {rows} rows, with its backward"
    yield Kernel(name, bytes_moved, 6 * rows * weight.numel(), candidates)


def gradient_kernels(device: str) -> Iterator[Kernel]:
    """The gradient of a weight: a product that writes float32, and one of 16 bits that a loop of Inductor's widens."""
    for rows, features, outputs in ((64, 32, 48),) if device == "cpu" else ((8192, 768, 3072), (8192, 4096, 4096)):
        x, grad = (torch.randn(rows, width, device=device, dtype=torch.bfloat16) for width in (features, outputs))

        def wide(grad: Tensor, x: Tensor) -> Tensor:
            return torch.mm(grad.t(), x, out_dtype=torch.float32)

        def rounded(grad: Tensor, x: Tensor) -> Tensor:
            return torch.mm(grad.t(), x).float()

        candidates = {AMP: compiled(wide, grad, x), COMPILED: compiled(rounded, grad, x)}
        bytes_moved, flops = 2 * (x.numel() + grad.numel()) + 4 * features * outputs, 2 * rows * features * outputs
        yield Kernel(f"gradient of a weight, {outputs}x{features}, {rows} rows", bytes_moved, flops, candidates)


def attention_kernels() -> Iterator[Kernel]:
    """The backward of GPTs' causal attention on the CPU, 64 features a head: as short as in the training step here, and
    longer.
    """
    for batch, tokens in ((4, 128), (1, 1024)):
        heads, features = 8, 64
        q, k, v, grad = torch.randn(4, batch, tokens, heads, features, dtype=torch.bfloat16).transpose(2, 3)
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        given = grad, q, k, v, out, logsumexp
        reference = torch.compile(attention_backward.attention_backward_reference)
        candidates: dict[str, Callable[[], object]] = {
            AMP: partial(attention_backward.ATTENTION_BACKWARD, *given, None, True, 0.125),
            "torch: flash": partial(attention_backward.FLASH_BACKWARD, *given, 0.0, True, scale=0.125),
            COMPILED: partial(reference, *given, True, 0.125),
        }
        unable = {}
        if not attention_backward.available():
            del candidates[AMP]
            unable[AMP] = "the kernel is one for AVX512-BF16 without AMX"
        # Reads q, k, v, the result and its gradient, writes three gradients; five products, half of each masked.
        moved, flops = 8 * q.numel() * q.itemsize, 5 * q.numel() * tokens
        yield Kernel(f"backward of attention, {batch}x{tokens}, {heads} heads", moved, flops, candidates, unable)


def adam_state(params: list[Tensor], grads: list[Tensor]) -> AdamTensors:
    """Weights of their own with these values, and what AdamW keeps of them; no copies."""
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


def compiled(function: Callable[..., object], *args: Any) -> Callable[[], object]:
    """A call of a function as Inductor compiles it for these sizes."""
    run = torch.compile(function, dynamic=False)
    return lambda: run(*args)


def trained(
    function: Callable[..., Any], given: Sequence[Tensor], grads: Any = None, of: Sequence[Tensor] = ()
) -> Callable[[], object]:
    """`differentiated`, as Inductor compiles the function for these sizes."""
    return differentiated(torch.compile(function, dynamic=False), given, grads, of)


def differentiated(
    run: Callable[..., Any], given: Sequence[Tensor], grads: Any = None, of: Sequence[Tensor] = ()
) -> Callable[[], object]:
    """Forward and backward, for the gradients of all that is given, or of some tensors alone."""
    return lambda: torch.autograd.grad(run(*given), of or given, grads)


def measure(make: Callable[..., Iterator[Kernel]], *args: Any) -> list[Row]:
    """Rows of every kernel that `make(*args)` gives, its candidates timed in turn."""
    rows: list[Row] = []
    try:
        for kernel in make(*args):
            rows += _measured(kernel)
    except Exception as error:  # what an illegal access leaves is a device that can't do anything any more
        rows.append(Row(f"the rest of {getattr(make, '__name__', 'them')}", AMP, why=in_one_line(error)))
    return rows


def _measured(kernel: Kernel) -> list[Row]:
    def seconds(call: Callable[[], object], calls: int) -> float:
        start = perf_counter()
        for _ in range(calls):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return (perf_counter() - start) / calls

    calls, held, unable = {}, {}, dict(kernel.unable)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, call in kernel.candidates.items():
        try:
            seconds(call, 2)
            held[name] = extra_bytes(device, call)
            calls[name] = 1 + int(SECONDS / seconds(call, 1))
        except Exception as error:  # one that is broken doesn't take the others along
            unable[name] = in_one_line(error)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, times_of in times.items():
            times_of.append(seconds(kernel.candidates[name], calls[name]))
    must = {"bytes": kernel.bytes, "flops": kernel.flops}
    return [
        *(Row(kernel.name, name, {"seconds": s, "peak_bytes": held[name], **must}) for name, s in times.items()),
        *(Row(kernel.name, name, why=why) for name, why in unable.items()),
    ]
