"""One optimizer step under a GradScaler: python -m benchmarks.scaler_step [--device cuda] [--model NAME] [--out FILE]

Unscale, check, clip, AdamW, scale update, and the weights' 16-bit copies brought up to date; candidates in turn.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from ampcompile.kernels.adam import AdamGroup, AdamTensors, adam_reference_
from ampcompile.kernels.check_grads import check_grads_reference
from ampcompile.scaler.grad_scaler import GradScaler
from ampcompile.weights import binding as weights
from benchmarks import machine
from benchmarks.architectures import build
from benchmarks.peers import AMP
from benchmarks.records import Row, spread, times_faster

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
    binding = weights.bind([torch.bfloat16] * len(matrices))
    binding.copies(matrices)

    def step() -> object:
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        return binding

    return step


def inductor(params: Params) -> Callable[[], object]:
    """The plain references of our kernels, compiled together."""

    def zeros() -> list[Tensor]:
        return [torch.zeros_like(param) for param in params]

    copies = [param.detach().bfloat16() if param.dim() > 1 else None for param in params]
    group = AdamGroup(1e-4, 0.9, 0.999, 1e-8, 0.01, decoupled_weight_decay=True, maximize=False)
    tensors = AdamTensors(
        groups=[group],
        params=[param.detach() for param in params],
        exp_avgs=zeros(),
        exp_avg_sqs=zeros(),
        max_exp_avg_sqs=[None] * len(params),
        steps=[torch.zeros((), device=param.device) for param in params],
        copies=copies,
        group_of=[0] * len(params),
    )
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


def measure(model: str, device: str, names: Sequence[str] = tuple(CANDIDATES), rounds: int = ROUNDS) -> list[Row]:
    """Seconds of a step in each round. Gradients are filled anew before each, untimed: unscaled again and again they
    would end in denormals, and every figure would triple.
    """
    start = [param.detach().to(device) for param in build(model, 1, 1, False)[0].parameters()]
    source = [torch.randn_like(param) * 2.0**16 for param in start]
    grads = [torch.empty_like(grad) for grad in source]
    steps = {}
    for name in names:
        params = [nn.Parameter(param.clone()) for param in start]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        steps[name] = CANDIDATES[name](params)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-2, rounds):
        for name in names if turn % 2 else reversed(names):
            torch._foreach_copy_(grads, source)
            seconds = timed(steps[name], device)
            if turn >= 0:
                times[name].append(seconds)
    count = sum(param.numel() for param in start)
    figures = {"parameters": count, "bytes": BYTES * count}
    return [Row(f"{CASE}, {model}", name, {"seconds": times[name], **figures}) for name in names]


def timed(step: Callable[[], object], device: str) -> float:
    """Seconds of one call, the device's work included."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - begin


def main() -> None:
    """Measure, print medians and ratios, and write JSON if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaler_step", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="GPT 23M", help="a name that benchmarks.architectures knows")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--without", nargs="*", default=[], choices=CANDIDATES, metavar="CANDIDATE")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = [name for name in CANDIDATES if name not in options.without]
    rows = measure(options.model, options.device, names, options.rounds)
    amp = next(row for row in rows if row.peer == AMP)
    for row in rows:
        low, middle, high = (1e3 * value for value in spread(row.figures["seconds"]))
        rate, faster = row.figures["bytes"] / middle / 1e6, times_faster(amp, row).middle
        print(f"{middle:7.2f} ms ({low:.2f} to {high:.2f}), {rate:6.1f} GB/s, {faster:5.2f} times amp's: {row.peer}")
    if options.out:
        content = {"about": machine.about(options.device), "commit": machine.commit(), "rows": [*map(asdict, rows)]}
        options.out.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
