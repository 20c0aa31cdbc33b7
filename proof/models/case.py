"""A model of the sweep: how it is made, what it is given, and how it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Inputs = dict[str, Any]


def plainly(run: Callable[..., Any], inputs: Inputs) -> Any:
    """One call with the inputs by name."""
    return run(**inputs)


@dataclass(frozen=True)
class Case:
    """`build` makes a model with random weights, `inputs` draws what it is given; both from torch's generator."""

    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    call: Callable[[Callable[..., Any], Inputs], Any] = plainly
    """The call of the model, or with the compiled one in its place."""
    package: str = "torch"
    """The package that it needs."""
