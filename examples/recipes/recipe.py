"""What every recipe shares: how its functions are run, and how two ways of running them are compared."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import ampcompile


@dataclass(frozen=True)
class Way:
    """How functions are run in mixed precision: compiled, or eagerly under `torch.autocast`."""

    compiled: bool
    lower: str = "inductor"
    dtype: torch.dtype = torch.float16

    def __call__(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """A function or module as it is called in a training loop."""
        if self.compiled:
            options: dict[str, Any] = {"dtype": self.dtype, "lower": self.lower}
            return torch.compile(f, backend="amp", options=options)

        def under_autocast(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", self.dtype):
                return f(*args, **kwargs)

        return under_autocast

    @property
    def optim(self) -> Any:
        """The optimizers that go with it."""
        return ampcompile.optim if self.compiled else torch.optim

    def scaler(self, init_scale: float = 2.0**16) -> torch.amp.GradScaler:
        """The scaler that goes with it."""
        kind = ampcompile.GradScaler if self.compiled else torch.amp.GradScaler
        return kind("cpu", init_scale=init_scale, growth_interval=4)


class Recipe(ABC):
    """One training loop. Subclasses build it in `build`, with every module that learns in `self.modules`."""

    modules: list[nn.Module]
    scaler: torch.amp.GradScaler

    def __init__(self, way: Way) -> None:
        self.way = way
        torch.manual_seed(0)
        self.random = torch.Generator().manual_seed(0)
        self.build()

    @abstractmethod
    def build(self) -> None:
        """Models, optimizers, scaler."""

    @abstractmethod
    def step(self) -> Tensor:
        """One iteration; its loss."""

    def weights(self) -> list[Tensor]:
        """All that was learned, as it is now."""
        return [p.detach().clone() for module in self.modules for p in module.parameters()]


@dataclass
class Run:
    """What a recipe did: losses, scales after each step, the weights before and after."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    before: list[Tensor] = field(default_factory=list)
    after: list[Tensor] = field(default_factory=list)

    @property
    def skipped(self) -> int:
        """Steps after which the scale was lowered."""
        scales = self.scales
        return sum(later < earlier for earlier, later in pairwise(scales))


def run(recipe: Recipe, steps: int) -> Run:
    """Take some steps."""
    made = Run(scales=[recipe.scaler.get_scale()], before=recipe.weights())
    for _ in range(steps):
        made.losses.append(recipe.step().item())
        made.scales.append(recipe.scaler.get_scale())
    made.after = recipe.weights()
    return made


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Relative L2 distance of all tensors together."""
    squares = sum(float((x - y).double().square().sum()) for x, y in zip(a, b, strict=True))
    return float((squares / sum(float(y.double().square().sum()) for y in b)) ** 0.5)


def compare(recipe: type[Recipe], steps: int = 12) -> None:
    """Run a recipe both ways and print what came of it."""
    torch.compiler.reset()  # each recipe may recompile as often as if it ran alone
    runs = {name: run(recipe(Way(compiled)), steps) for name, compiled in (("eager autocast", False), ("amp", True))}
    print(f"{(recipe.__doc__ or '').splitlines()[0]}")
    for name, made in runs.items():
        print(
            f"  {name:14}  loss {made.losses[0]:.4f} -> {made.losses[-1]:.4f}   scale {made.scales[-1]:g}, "
            f"{made.skipped} steps skipped"
        )
    eager, amp = runs.values()
    print(f"  weights {100 * distance(amp.after, eager.after):.3f} % apart after {steps} steps")


def copied(module: nn.Module) -> nn.Module:
    """A module with weights of its own."""
    return copy.deepcopy(module)
