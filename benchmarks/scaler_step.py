"""One optimizer step under a GradScaler: unscale, check, clip, AdamW, scale update, weights cast again."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from ampcompile.optim import AdamW
from ampcompile.optim.keep_masters import keep_masters
from ampcompile.scaler.grad_scaler import GradScaler
from ampcompile.timing import take_turns, time_call
from ampcompile.weights import Binding, CopySpec, Form
from benchmarks.architectures import build
from benchmarks.peers import AMP
from benchmarks.records import Records

WARM_UP, ROUNDS = 2, 25
STOCK = "torch: unscale_, clip_grad_norm_, fused AdamW, update"
Params = list[nn.Parameter]
Step = Callable[[], object]


def make_stock(params: Params, cast: bool = False, kind: str = "torch.optim.AdamW", **options: Any) -> Step:
    """torch's scaler and an optimizer; with `cast`, the copies that autocast would make in the next forward pass."""
    optimizer = resolve_name(kind)(params, lr=1e-4, **options)
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


def make_ours(params: Params) -> Step:
    """Our scaler, with a bfloat16 copy of every matrix in the hands of a compiled graph."""
    binding, step = _hold_copies(params), _make_scaled(torch.optim.AdamW(params, lr=1e-4))
    return lambda: (step(), binding)


def make_own(params: Params, states: str = "float32") -> Step:
    """Our optimizer alone, with the same copies."""
    binding, optimizer = _hold_copies(params), AdamW(params, lr=1e-4, states=states)

    def step() -> Binding:
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        return binding

    return step


def make_masters(params: Params, how: str, states: str = "float32") -> Step:
    """Our scaler on bfloat16 parameters and gradients, whose optimizer keeps masters."""
    weights = [nn.Parameter(param.detach().bfloat16()) for param in params]
    for weight in weights:
        weight.grad = (torch.randn_like(weight) * 2.0**16).bfloat16()
    optimizer = torch.optim.AdamW(weights, lr=1e-4)
    keep_masters(optimizer, how, states=states)
    return _make_scaled(optimizer)


def _hold_copies(params: Params) -> Binding:
    matrices = [param for param in params if param.dim() > 1]
    binding = Binding([CopySpec(i, Form(torch.bfloat16)) for i in range(len(matrices))])
    binding.copies(matrices)
    return binding


def _make_scaled(optimizer: torch.optim.Optimizer) -> Step:
    scaler = GradScaler(device := optimizer.param_groups[0]["params"][0].device.type)
    scaler.scale(torch.ones((), device=device))

    def step() -> None:
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


CANDIDATES: dict[str, Callable[[Params], Step]] = {
    STOCK: partial(make_stock, fused=True),
    f"{STOCK}, weights cast": partial(make_stock, cast=True, fused=True),
    "torch: unscale_, clip_grad_norm_, foreach AdamW, update": partial(make_stock, foreach=True),
    AMP: make_ours,
    f"{AMP}, its own AdamW without a scaler": make_own,
    f'{AMP}, the same with states="8bit"': partial(make_own, states="8bit"),
    **{
        f"{name}'s AdamW8bit, torch's scaler, weights cast": partial(
            make_stock, cast=True, kind=f"{name}.optim.AdamW8bit"
        )
        for name in ("torchao", "bitsandbytes")
        if find_spec(name)
    },
    f'{AMP}, 16-bit parameters, masters "remainder"': partial(make_masters, how="remainder"),
    f'{AMP}, the same with "remainder8" and states="8bit"': partial(make_masters, how="remainder8", states="8bit"),
}
"""Other packages' where these are installed."""


def measure(model: str, device: str, records: Records) -> None:
    """Note the seconds of a step in each round, of all candidates in turn.

    Gradients are filled anew before each, untimed: unscaled again and again they would end in denormals, and every
    figure would triple.
    """
    start = [param.detach().to(device) for param in build(model, 1, 1, False)[0].parameters()]
    source = [torch.randn_like(param) * 2.0**16 for param in start]
    grads = [torch.empty_like(grad) for grad in source]
    steps = {}
    for name, make in CANDIDATES.items():
        params = [nn.Parameter(param.clone()) for param in start]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        steps[name] = make(params)

    def time_step(name: str) -> float:
        torch._foreach_copy_(grads, source)
        return time_call(device, steps[name])

    times = {name: seconds[WARM_UP:] for name, seconds in take_turns(time_step, steps, WARM_UP + ROUNDS).items()}
    count = sum(param.numel() for param in start)
    for name, seconds_of in times.items():
        records.add(f"a step of {model}, {count} parameters in {len(start)}", name, seconds=seconds_of)
