"""Differences between two runs of one call: in dtypes, values, aliasing and strides. An empty list if they agree."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.numbers import same_bits

WORSE = 1.1
"""How many times eager autocast's error ours may be, plus one ulp."""


class Difference(NamedTuple):
    """In what two runs differ. `kind` is what expected failures are filed under: dtypes, values, aliasing, strides."""

    kind: str
    text: str


class Run(NamedTuple):
    """The inputs and results of one call."""

    inputs: list[Tensor]
    """As the call left them."""
    results: list[object]
    """The leaves of what it returned."""
    gradients: list[Tensor | None]
    """Of the inputs that ask for one, in order."""

    def tensors(self) -> list[Tensor]:
        """All numbers to be compared."""
        return [t for t in (*self.inputs, *self.results, *self.gradients) if isinstance(t, Tensor)]


def differences(ours: Run, theirs: Run, exact: Run | None, random: bool) -> list[Difference]:
    """In what a run differs from eager autocast's. `exact`: the run in float64, if there is one; `random`: the values
    depend on how many random numbers are drawn, or on memory that nobody wrote.
    """
    found = _dtypes(ours, theirs)
    if found:
        return found
    if not random:
        found += _values(ours, theirs, exact)
    if _shared(ours) != _shared(theirs):
        found.append(Difference("aliasing", f"shared {_shared(ours)}, eager {_shared(theirs)}"))
    layouts = [[_layout(t) for t in run.results] for run in (ours, theirs)]
    if layouts[0] != layouts[1]:
        found.append(Difference("strides", f"strides {layouts[0]}, eager {layouts[1]}"))
    return found


def same_numbers(ours: Run, theirs: Run) -> bool:
    """True if all values are equal, bit by bit."""
    return same_bits([dense(t) for t in ours.tensors()], [dense(t) for t in theirs.tensors()])


def dense(value: Any) -> Tensor:
    """A tensor of any layout and type as a strided one that can be compared."""
    value = value.detach() if value.layout is torch.strided else value.detach().to_dense()
    return value.float() if value.is_floating_point() and value.itemsize == 1 else value


def too_far(ours: Tensor, theirs: Tensor, exact: Tensor) -> str:
    """How `ours` is further from `exact` than `WORSE` times `theirs` plus one ulp of the largest number; else ""."""
    if ours.shape != exact.shape:
        return f"shape {tuple(ours.shape)}, not {tuple(exact.shape)}"
    if not (ours.is_floating_point() or ours.is_complex()):
        return "" if torch.equal(ours, exact.to(ours.dtype)) else f"{_counted(ours != theirs)} differ"
    ulp = torch.finfo(ours.dtype).eps
    o, t, e = (_in_double(x) for x in (ours, theirs, exact))
    known = t.isfinite() & e.isfinite()
    if lost := int((known & ~o.isfinite()).sum()):
        return f"{lost} not finite where eager autocast and float64 are"
    agreed = ~known & ((t == e) | (t.isnan() & e.isnan()))
    if lost := int((agreed & (o != e) & ~(o.isnan() & e.isnan())).sum()):
        return f"{lost} differ where eager autocast's and float64's are the same infinities or NaN"
    if not known.any():
        return ""
    mine, stock, size = (float(x[known].abs().max()) for x in (o - e, t - e, e))
    bound = WORSE * stock + ulp * max(size, torch.finfo(ours.dtype).tiny)
    return f"error {mine:.3g}, eager {stock:.3g}, largest {size:.3g}" if mine > bound else ""


def _dtypes(ours: Run, theirs: Run) -> list[Difference]:
    found = []
    for name in ("results", "gradients"):
        a, b = ([kind_of(value) for value in getattr(run, name)] for run in (ours, theirs))
        if a != b:
            found.append(Difference("dtypes", f"{name} {', '.join(a)}; eager {', '.join(b)}"))
    return found


def kind_of(value: object) -> str:
    """A tensor's dtype and shape, or the type of what is none."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _values(ours: Run, theirs: Run, exact: Run | None) -> list[Difference]:
    found, reference = [], exact or theirs
    for name in Run._fields:
        rows = zip(*(getattr(run, name) for run in (ours, theirs, reference)), strict=True)
        for n, (mine, stock, right) in enumerate(rows):
            if same_bits(*(dense(x) if isinstance(x, Tensor) else x for x in (mine, stock))):
                continue
            text = too_far(dense(mine), dense(stock), dense(right)) if isinstance(mine, Tensor) else f"{mine}, {stock}"
            if text:
                found.append(Difference("values", f"{name}[{n}]: {text}"))
    return found


def _in_double(value: Tensor) -> Tensor:
    value = value.resolve_conj().resolve_neg()
    return (torch.view_as_real(value) if value.is_complex() else value).double()


def _counted(where: Tensor) -> str:
    return f"{int(where.sum())} of {where.numel()}"


def _shared(run: Run) -> list[tuple[int, int]]:
    """Which results share memory with an input or an earlier result; inputs are counted first."""
    tensors: Sequence[object] = [*run.inputs, *run.results]
    places = [
        t.untyped_storage().data_ptr() if isinstance(t, Tensor) and t.layout is torch.strided and t.numel() else 0
        for t in tensors
    ]
    later = range(len(run.inputs), len(tensors))
    return [(i, j) for j in later for i in range(j) if places[i] and places[i] == places[j]]


def _layout(value: object) -> object:
    """The strides that matter: those of dimensions with several entries."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or not value.numel():
        return str(getattr(value, "layout", ""))
    return [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]
