"""python -m benchmarks.kept [MODEL] [--batch N] [--length N]   what backward keeps, by option: bytes, time, error

A training step of a GPT ("GPT 4x256" is 4 layers of width 256) on a CPU: the bytes that forward keeps for backward, as
`ampcompile.explain` counts them; the time of forward and backward; the error of all gradients beside float64.
"""

import argparse
import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ampcompile
from ampcompile.timing import take_turns, time_call
from benchmarks.architectures import build
from benchmarks.tables import table

BUDGET, CHECKPOINTS, AROUND = "activation_memory_budget", "checkpoints", "around"
MATRICES = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
PRODUCTS = {"context_fn": partial(create_selective_checkpoint_contexts, MATRICES)}
ROWS: dict[str, dict[str, Any]] = {
    "as it is": {},
    'saved="fp8"': {"saved": "fp8"},
    **{f"{BUDGET}={budget}": {BUDGET: budget} for budget in (0.5, 0.1)},
    f'{BUDGET}=0.5, saved="fp8"': {BUDGET: 0.5, "saved": "fp8"},
    "a checkpoint around each block": {CHECKPOINTS: {}},
    "the same, which saves products": {CHECKPOINTS: PRODUCTS},
    'the same, saved="fp8"': {CHECKPOINTS: PRODUCTS, "saved": "fp8"},
    "save_on_cpu around the step": {AROUND: save_on_cpu},
}
ROUNDS = 12


def _gradients(model: nn.Module, run: Callable[..., Tensor], args: tuple[Tensor, ...], around: Any) -> list[Tensor]:
    model.zero_grad()
    with around():
        run(*args).backward()
    return [p.grad.double() for p in model.parameters() if p.grad is not None]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="GPT 4x256")
    parser.add_argument("--lower", default="inductor", help="aot_eager: bytes and errors in seconds")
    parser.add_argument("--only", default="", help="rows whose names hold this text, beside the first")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    given = parser.parse_args()
    torch._dynamo.config.recompile_limit = 2 * len(ROWS)  # all rows compile the same forward
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    model, args = build(given.model, given.batch, given.length, training=True)
    exact = copy.deepcopy(model).double()
    right = _gradients(exact, exact, args, nullcontext)
    found, steps = {}, {}
    for name, options in ((name, row) for name, row in ROWS.items() if given.only in name or not row):
        asked, twin = {**options, "lower": given.lower}, copy.deepcopy(model)
        around = asked.pop(AROUND, nullcontext)
        if (how := asked.pop(CHECKPOINTS, None)) is not None:
            for block in twin.blocks:  # type: ignore[union-attr]
                block.forward = partial(checkpoint, block.forward, use_reentrant=False, **how)
        kept = ampcompile.explain(twin, **asked)(*args).saved_totals.backward
        step = partial(_gradients, twin, torch.compile(twin, backend="amp", options=asked), args, around)
        apart = zip(step(), right, strict=True)
        error = sum((a - b).square().sum() for a, b in apart) / sum(b.square().sum() for b in right)
        found[name], steps[name] = (kept, float(error) ** 0.5), step
    rounds = take_turns(lambda name: time_call("cpu", steps[name]), steps, ROUNDS)
    first, usual = found["as it is"][0], min(rounds["as it is"])
    rows = [
        [name, f"{kept / 1e6:.1f} MB ({kept / first:.2f})", f"{min(rounds[name]) / usual:.2f}", f"{error:.4f}"]
        for name, (kept, error) in found.items()
    ]
    print(table([given.model, "kept for backward", "time of a step", "error of gradients"], rows))


if __name__ == "__main__":
    main()
