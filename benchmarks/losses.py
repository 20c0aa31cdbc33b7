"""A linear layer and its cross entropy, forward and backward: ours, torch's own, Inductor's; time, memory, errors."""

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ampcompile.kernels.linear_cross_entropy import linear_cross_entropy
from benchmarks.apart import FailedError, apart
from benchmarks.memory import extra_bytes
from benchmarks.numbers import relative_error
from benchmarks.records import Records

INDUCTOR, OURS = "Inductor's code", "ampcompile.kernels.linear_cross_entropy"
TORCH = {f"F.linear_cross_entropy, {policy}": policy for policy in ("balanced", "compact", "accurate")}
SIZES = ((2048, 256, 32000), (8192, 64, 50257), (4096, 512, 50257))
"""Rows, features, classes."""
TINY = ((64, 16, 128),)
LOW = torch.bfloat16


class Loss:
    """The loss of a 16-bit input and a float32 weight that is rounded to 16 bits, one way."""

    def __init__(self, way: str, rows: int, features: int, classes: int, device: str) -> None:
        torch.manual_seed(0)
        self.device, self.target = device, torch.randint(classes, (rows,), device=device)
        x, weight = torch.randn(rows, features, device=device), torch.randn(classes, features, device=device)
        self.given = [x.to(LOW).requires_grad_(), (weight * features**-0.5).requires_grad_()]
        self.loss = self._make(way)

    def _make(self, way: str) -> Callable[[Tensor, Tensor], Tensor]:
        target = self.target
        if way == OURS:
            return lambda x, weight: linear_cross_entropy(x, weight, None, weight.detach().to(LOW), None, target)[0]
        if way == INDUCTOR:
            layer = lambda x, weight: F.cross_entropy(F.linear(x, weight.to(LOW)).float(), target)  # noqa: E731
            return torch.compile(layer, dynamic=False)
        policy: Any = TORCH[way]
        options = torch.nn.LinearCrossEntropyOptions(acc_policy=policy)  # from torch 2.13 on
        return lambda x, weight: F.linear_cross_entropy(x, weight.to(LOW), target, options=options)

    def measure(self, rounds: int = 4) -> dict[str, Any]:
        """Seconds in each round, bytes held beside what is there before, errors of both gradients."""
        exact = torch.autograd.grad(
            F.cross_entropy(F.linear(*(each.double() for each in self.given)), self.target), self.given
        )
        found = self._call()
        errors = [relative_error([ours], [right]) for ours, right in zip(found, exact, strict=True)]
        del exact, found
        return {
            "peak_bytes": min(extra_bytes(self.device, self._call) for _ in range(2)),
            "seconds": [self._time() for _ in range(rounds)],
            "error": errors[1],
            "error of the input's gradient": errors[0],
        }

    def _call(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.loss(*self.given), self.given)

    def _time(self) -> float:
        begin = perf_counter()
        self._call()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return perf_counter() - begin


def measure(sizes: tuple[tuple[int, int, int], ...], device: str, records: Records, caches: Path) -> None:
    """Note each way for each size, in a process of its own."""
    for rows, features, classes in sizes:
        stage = f"{rows} rows, {features} features, {classes} classes"
        for way in (INDUCTOR, OURS, *TORCH):
            if way not in records.stages.get(stage, {}):
                with apart(Loss, way, rows, features, classes, device, caches=caches) as other:
                    try:
                        records.add(stage, way, **other.ask("measure"))
                    except FailedError as error:
                        records.add(stage, way, why=str(error))
