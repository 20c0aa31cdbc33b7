"""python -m benchmarks.kept [MODEL] [--batch N] [--length N]   what backward keeps, by option: bytes, time, error

A training step of a GPT ("GPT 4x256" is 4 layers of width 256) on a CPU: the bytes that forward keeps for backward, as
`ampcompile.explain` counts them; the time of forward and backward; the error of all gradients beside float64.
"""

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampcompile
from benchmarks.architectures import build
from benchmarks.tables import table

BUDGET, CHECKPOINTS = "activation_memory_budget", "checkpoints"
ROWS: dict[str, dict[str, Any]] = {
    "as it is": {},
    'saved="fp8"': {"saved": "fp8"},
    **{f"{BUDGET}={budget}": {BUDGET: budget} for budget in (0.5, 0.1)},
    f'{BUDGET}=0.5, saved="fp8"': {BUDGET: 0.5, "saved": "fp8"},
    "a checkpoint around each block": {CHECKPOINTS: True},
}
ROUNDS = 12


class Checkpointed(nn.Module):
    """A module that is computed again in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        """As the module's."""
        return checkpoint(self.inner, x, use_reentrant=False)


def _gradients(model: nn.Module, run: Callable[..., Tensor], args: tuple[Tensor, ...]) -> list[Tensor]:
    model.zero_grad()
    run(*args).backward()
    return [p.grad.double() for p in model.parameters() if p.grad is not None]


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="GPT 4x256")
    parser.add_argument("--lower", default="inductor", help="aot_eager: bytes and errors in seconds")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    given = parser.parse_args()
    model, args = build(given.model, given.batch, given.length, training=True)
    exact = copy.deepcopy(model).double()
    right = _gradients(exact, exact, args)
    found, steps = {}, {}
    for name, options in ROWS.items():
        torch._dynamo.reset()
        asked, twin = {**options, "lower": given.lower}, copy.deepcopy(model)
        if asked.pop(CHECKPOINTS, False):
            twin.blocks = nn.ModuleList(map(Checkpointed, twin.blocks))  # type: ignore[arg-type]
        kept = ampcompile.explain(twin, **asked)(*args).saved_totals.backward
        step = partial(_gradients, twin, torch.compile(twin, backend="amp", options=asked), args)
        apart = zip(step(), right, strict=True)
        error = sum((a - b).square().sum() for a, b in apart) / sum(b.square().sum() for b in right)
        found[name], steps[name] = (kept, float(error) ** 0.5), step
    times = {name: min(_seconds(step) for _ in range(ROUNDS)) for name, step in steps.items()}
    first, usual = found["as it is"][0], times["as it is"]
    rows = [
        [name, f"{kept / 1e6:.1f} MB ({kept / first:.2f})", f"{times[name] / usual:.2f}", f"{error:.4f}"]
        for name, (kept, error) in found.items()
    ]
    print(table([given.model, "kept for backward", "time of a step", "error of gradients"], rows))


if __name__ == "__main__":
    main()
