"""First-order error analysis: the error an op's rounding adds to a result is its own error times the result's adjoint.

The run in high precision goes on from the mixed run's numbers, and is differentiated: each op is an autograd function,
whose backward reads off what the op's rounding adds to the result that is differentiated. As in CHEF-FP and ADAPT, but
that the error is measured, not bounded by a formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils.weak import WeakTensorKeyDictionary

from ampcompile.dtypes import LOW
from ampcompile.passes.analysis.op_traits import CONVERSIONS_AFTER, PRODUCTS_AFTER, has
from ampcompile.torch_private import pytree

from .attention import is_attention
from .high_precision import REFUSED, compute_in_high_precision, is_floating
from .records import Place

PROBES = 8
"""Random directions in which each result is differentiated."""
# They return whatever was in memory: it isn't rounded, and somebody overwrites it.
_UNWRITTEN = frozenset(
    f"aten::{name}" for name in ["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"]
)


@dataclass
class Rounding:
    """The rounding of one result of an op in the mixed run, and what it adds to the results of the run."""

    place: Place
    low: bool
    """True if its op computes in 16 bits: a result of it has them, as that of a norm whose weight has float32."""
    elements: int
    origins: frozenset[str]
    """Modules whose products make the op compute in 16 bits: its own, or of an op that takes what arrives, theirs."""
    readers: set[str] = field(default_factory=set)
    """Modules with products that read the results: kept in float32 they don't round them again."""
    squares: dict[str, float] = field(default_factory=dict)
    """Expected squared error that it adds, over the squared norm, by result; infinite where it overflowed."""
    is_cast: bool = False
    called: str = ""
    """The op that the user called, as policies name it: `softmax` for `aten._softmax`; empty for casts and backward."""

    @property
    def modules(self) -> frozenset[str]:
        """Modules that prevent the rounding if all of them are in float32; none do if it is in float32 anyway."""
        if not self.low:
            return frozenset()
        return frozenset(self.readers if self.is_cast and self.readers else {*self.origins, *self.readers})

    def happens(self, kept: Set[str]) -> bool:
        """Return True if it happens while these modules are in float32; an op that takes what arrives may be in one."""
        prevented = self.modules - self.origins if self.place.module in kept else self.modules
        return not self.low or not prevented <= kept


class Adjoints:
    """One run in high precision that goes on from the mixed run's numbers, with the roundings of all its ops."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.roundings: list[Rounding] = []
        self.unfollowed: set[str] = set()  # ops that have no derivative: what comes before them seems to add nothing
        self.result, self.norm = "", 1.0  # that is differentiated now
        self._sources = WeakTensorKeyDictionary()  # the roundings that a value holds unchanged
        # An operand of all ops: autograd would leave out those that read only what is taken as exact.
        self._start = torch.zeros((), dtype=dtype, requires_grad=True)

    def follow(self, node: Node, place: Place, mixed: Any, arguments: Any, exact: Any) -> Any:
        """Return an op's result in the mixed run, in high precision, and remember how to differentiate it.

        `arguments` are what this method returned for the op's operands, and `exact` is the op's result on them.
        """
        results, spec = pytree.tree_flatten(exact)
        rounded = pytree.tree_leaves(mixed)
        at = [i for i, value in enumerate(results) if is_floating(value)]
        operands = [leaf for leaf in pytree.tree_leaves(arguments) if is_floating(leaf)]
        if all(any(results[i] is operand for operand in operands) for i in at):  # or there is none
            return exact
        if has(node.target, _UNWRITTEN):
            return exact
        errors = [_error(rounded[i], results[i]) for i in at]
        lossy, overflows = (any(bool(test(error)) for error in errors) for test in (Tensor.any, _has_infinity))
        is_cast = has(node.target, CONVERSIONS_AFTER)
        sources = [source for operand in operands for source in self._sources.get(operand, ())]
        origins = frozenset({place.module})
        if has(node.target, PRODUCTS_AFTER) or is_attention(node.target):
            for source in sources:
                source.readers.add(place.module)
        elif sources and not is_cast and not overflows:  # an overflow is prevented where it is
            origins = frozenset[str]().union(*(source.origins for source in sources))
        low = any(rounded[i].dtype in LOW for i in at)
        called = "" if is_cast or place.backward else _called(node)
        roundings = [Rounding(place, low, results[i].numel(), origins, is_cast=is_cast, called=called) for i in at]
        if lossy:
            self.roundings += roundings
        op = _Op(self, node, place, arguments, mixed, at, errors if lossy else (), roundings)
        values = [results[i] + error.nan_to_num(0, 0, 0) for i, error in zip(at, errors, strict=True)]
        with torch.enable_grad():
            followed = _Followed.apply(op, values, self._start, *operands)
        for i, value, rounding in zip(at, followed, roundings, strict=True):
            self._sources[value] = sources if not lossy else [rounding] if low else []
            results[i] = value
        return pytree.tree_unflatten(results, spec)

    def differentiate(self, results: Mapping[str, Sequence[Tensor]]) -> None:
        """Add to each rounding what it adds to each of these, as a mean over random directions."""
        generator = torch.Generator().manual_seed(0)
        for self.result, values in results.items():
            differentiable = [value for value in values if value.requires_grad and value.numel()]
            self.norm = math.sqrt(sum(float(value.detach().abs().square().sum()) for value in values))
            for _ in range(PROBES if differentiable and self.norm else 0):
                signs = [torch.randint(2, v.shape, generator=generator).mul(2).sub(1).to(v) for v in differentiable]
                torch.autograd.grad(differentiable, [self._start], signs, retain_graph=True, allow_unused=True)


@dataclass(frozen=True)
class _Op:
    adjoints: Adjoints
    node: Node
    place: Place
    arguments: Any
    mixed: Any
    floating: Sequence[int]
    """Which of its results are floating."""
    errors: Sequence[Tensor]
    roundings: Sequence[Rounding]

    def note(self, adjoints: Sequence[Tensor]) -> None:
        """Add what the rounding adds in one direction, the elements' errors taken as independent of each other."""
        result, norm = self.adjoints.result, self.adjoints.norm
        for rounding, error, adjoint in zip(self.roundings, self.errors, adjoints, strict=False):  # no errors: exact
            added = math.inf if _has_infinity(error) else float((error.abs() * adjoint.abs() / norm).square().sum())
            rounding.squares[result] = rounding.squares.get(result, 0.0) + added / PROBES

    def pull_back(self, needed: Sequence[bool], adjoints: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the adjoints of the operands, None where there is none, computing the op once more."""
        leaves, spec = pytree.tree_flatten(self.arguments)
        at = [i for i, leaf in enumerate(leaves) if is_floating(leaf)]
        for i, need in zip(at, needed, strict=True):
            leaves[i] = leaves[i].detach().requires_grad_(need)
        none: list[Tensor | None] = [None] * len(at)
        try:
            with torch.enable_grad():
                args, kwargs = pytree.tree_unflatten(leaves, spec)
                again = compute_in_high_precision(
                    self.node, args, kwargs, self.mixed, self.adjoints.dtype, differentiable=True
                )
            if again is None:
                return none
            results = [pytree.tree_leaves(again)[i] for i in self.floating]
            pairs = [pair for pair in zip(results, adjoints, strict=True) if pair[0].requires_grad]
            if not pairs:
                return none
            wanted = [leaves[i] for i in at if leaves[i].requires_grad]
            found = iter(torch.autograd.grad([r for r, _ in pairs], wanted, [a for _, a in pairs], allow_unused=True))
            return [next(found) if need else None for need in needed]
        except torch.OutOfMemoryError:
            raise
        except REFUSED:
            self.adjoints.unfollowed.add(self.place.op)
            return none


class _Followed(torch.autograd.Function):
    """An op as autograd sees it. Its backward computes the op again, so that only operands are held."""

    @staticmethod
    def forward(ctx: Any, op: _Op, values: list[Tensor], start: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.op = op
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *adjoints: Tensor) -> Any:
        ctx.op.note(adjoints)
        return None, None, None, *ctx.op.pull_back(ctx.needs_input_grad[3:], adjoints)


def _called(node: Node) -> str:
    before = node.meta.get("from_node") or ()  # in the graph that AOTAutograd was given
    namespace, dot, rest = before[0].target.partition(".") if before else ("", "", "")
    name = rest.partition(".")[0]
    return name if namespace == "aten" else f"{namespace}::{name}" if dot else ""


def _has_infinity(error: Tensor) -> Tensor:
    return error.isinf().any()


def _error(mixed: Tensor, exact: Tensor) -> Tensor:
    """Return what an op's rounding added to each element, infinite where it overflowed.

    Where the mixed run had lost its operands already, it is what rounding the result alone would add.
    """
    rounded = torch.where(mixed.isfinite(), mixed, exact.to(mixed.dtype)).to(exact.dtype)
    return torch.where(exact.isfinite(), rounded - exact, 0)
