"""One call of the database, run in the ways that are compared."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ampcompile.dtypes import FLOATS
from proof.ops.compare import Run

SEED = 1234
DOUBLE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}


@dataclass(frozen=True)
class Call:
    """An operator and its arguments; `restrict` keeps of its results what has one gradient."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    restrict: Callable[[Any], Any] = lambda results: results

    def floats(self) -> list[Tensor]:
        """Its floating operands."""
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if is_float(x)]

    def in_dtypes(self, dtypes: list[torch.dtype]) -> "Call":
        """The same with floating operands in these dtypes, in order."""
        left = iter(dtypes)
        return self._map(lambda x: _converted(x, next(left)) if is_float(x) else x)

    def in_double(self) -> "Call":
        """The same in float64; where a dtype is asked for, too."""

        def widen(x: Any) -> Any:
            if isinstance(x, Tensor):
                return _converted(x, torch.float64 if is_float(x) else DOUBLE.get(x.dtype, x.dtype))
            return (torch.float64 if x in FLOATS else DOUBLE.get(x, x)) if isinstance(x, torch.dtype) else x

        return self._map(widen)

    def run(self, how: Callable[[Any], Any], around: AbstractContextManager, gradients: bool, seed: int = SEED) -> Run:
        """Call `how(function)` inside `around`, forward alone or with gradients, and keep what comes of it."""
        fresh = self._map(lambda x: _fresh(x, gradients) if isinstance(x, Tensor) else x)
        inputs = [x for x in pytree.tree_leaves((fresh.args, fresh.kwargs)) if isinstance(x, Tensor)]
        op = self.op
        function = how(lambda args, kwargs: op(*args, **kwargs))
        torch.manual_seed(seed)
        with torch.set_grad_enabled(gradients), around:
            results = function(fresh.args, fresh.kwargs)
        found = grads_of(self.restrict(results), inputs) if gradients else []
        return Run(inputs, pytree.tree_leaves(results), found)

    def _map(self, function: Callable[[Any], Any]) -> "Call":
        args, kwargs = pytree.tree_map(function, (self.args, self.kwargs))
        return Call(self.op, args, kwargs, self.restrict)


def is_float(x: Any) -> bool:
    """True if autocast may convert it."""
    return isinstance(x, Tensor) and x.dtype in FLOATS


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype).requires_grad_(x.requires_grad)


def _fresh(x: Tensor, gradients: bool) -> Tensor:
    return x.detach().clone().requires_grad_(gradients and x.requires_grad)


def grads_of(results: Any, inputs: list[Tensor]) -> list[Tensor | None]:
    """Of all inputs that ask for one, from the same incoming gradients for all runs but for their rounding."""
    asked = [x for x in inputs if x.requires_grad]
    outputs = [y for y in pytree.tree_leaves(results) if isinstance(y, Tensor) and y.requires_grad]
    if not asked or not outputs:
        return []
    draw = torch.Generator().manual_seed(SEED)
    incoming = [torch.randn(y.shape, generator=draw, dtype=torch.float32).bfloat16().to(y.dtype) for y in outputs]
    return list(torch.autograd.grad(outputs, asked, incoming, allow_unused=True))


def eager(function: Any) -> Any:
    """The call itself."""
    return function


def stock(backend: str) -> Callable[[Any], Any]:
    """By a backend of torch."""
    return lambda function: torch.compile(function, backend=backend)


def amp(**options: Any) -> Callable[[Any], Any]:
    """By this package."""
    return lambda function: torch.compile(function, backend="amp", options=copy.copy(options))


def autocast(low: torch.dtype) -> AbstractContextManager:
    """An ambient autocast."""
    return torch.autocast("cpu", low, cache_enabled=False)
