"""Compare the numbers of a mixed run with exact ones: relative error, overflow, flush to zero, NaN."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_FLOAT32 = torch.finfo(torch.float32)
_SMALLEST = _FLOAT32.smallest_normal * _FLOAT32.eps


@dataclass(frozen=True)
class Numbers:
    """Measurements of some floating values. Errors are L2 distances over L2 norms, None where nothing was compared.

    They are NaN where no element is a finite number in both runs.
    """

    local: float | None
    """Error of each op alone, against the same op in high precision on the mixed run's own inputs."""
    cumulative: float | None
    """Error against a run in high precision from the start."""
    largest: float
    """The largest finite magnitude."""
    overflowed: float
    """Share of the elements that aren't finite where float32 would give a finite number, of the op alone."""
    flushed: float
    """Share of the elements that are zero where float32 would give another number, of the op alone."""
    elements: int
    not_finite: float = 0.0
    """Share of the elements that are NaN or infinite in the mixed run, without the infinities that both runs have."""
    not_finite_exact: float = 0.0
    """The same in the run in high precision."""


def measure(mixed: Sequence[Tensor], local: Sequence[Tensor] | None, exact: Sequence[Tensor] | None) -> Numbers:
    """Measure one op's results; `local` and `exact` are in high precision."""
    elements = sum(value.numel() for value in mixed)
    pairs = list(zip(mixed, local, strict=True)) if local is not None else []
    other = exact if exact is not None else local
    masks = [find_not_finite(m, e) for m, e in zip(mixed, other or mixed, strict=True)]
    return Numbers(
        local=_worst(relative_error(m, e) for m, e in pairs) if local is not None else None,
        cumulative=(
            _worst(relative_error(m, e) for m, e in zip(mixed, exact, strict=True)) if exact is not None else None
        ),
        largest=_worst(_largest(value) for value in mixed),
        overflowed=sum(_count(~m.isfinite() & _finite_in_float32(e)) for m, e in pairs) / max(elements, 1),
        flushed=sum(_count((m == 0) & (e.abs() >= _SMALLEST)) for m, e in pairs) / max(elements, 1),
        elements=elements,
        not_finite=sum(_count(mask) for mask, _ in masks) / max(elements, 1),
        not_finite_exact=sum(_count(mask) for _, mask in masks if other is not None) / max(elements, 1),
    )


def combine(parts: Sequence[Numbers]) -> Numbers:
    """Combine several measurements into one: the worst errors, shares of all elements."""
    elements = sum(part.elements for part in parts)
    local = [part.local for part in parts if part.local is not None]
    cumulative = [part.cumulative for part in parts if part.cumulative is not None]
    return Numbers(
        local=_worst(local) if local else None,
        cumulative=_worst(cumulative) if cumulative else None,
        largest=_worst(part.largest for part in parts),
        overflowed=_share(parts, "overflowed"),
        flushed=_share(parts, "flushed"),
        elements=elements,
        not_finite=_share(parts, "not_finite"),
        not_finite_exact=_share(parts, "not_finite_exact"),
    )


def _share(parts: Sequence[Numbers], name: str) -> float:
    return sum(getattr(part, name) * part.elements for part in parts) / max(sum(part.elements for part in parts), 1)


def find_not_finite(mixed: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks of the NaNs and infinities of the mixed run, and of the exact run, that the other doesn't have."""
    same_sign = torch.ones_like(mixed, dtype=torch.bool) if mixed.is_complex() else mixed.sign() == exact.sign()
    agreeing = mixed.isinf() & (exact.abs() > _FLOAT32.max) & same_sign
    return ~mixed.isfinite() & ~agreeing, ~exact.isfinite() & ~agreeing


def squares(mixed: Tensor, exact: Tensor) -> tuple[float, float]:
    """Squared L2 distance, and squared norm of `exact`, over the elements that are finite in float32.

    NaN if there are none; infinite distance if `mixed` isn't finite at one of them, or is finite where `exact` isn't.
    """
    comparable = _finite_in_float32(exact)
    lost = bool((mixed.isfinite() & ~exact.isfinite()).any())
    if comparable.numel() and not lost and not comparable.any():
        return math.nan, math.nan
    exact = torch.where(comparable, exact, 0)
    difference = torch.where(comparable, mixed.to(exact.dtype), 0) - exact
    distance = float(torch.linalg.vector_norm(difference).double())
    distance = math.inf if lost else distance
    return (distance**2 if math.isfinite(distance) else math.inf), float(torch.linalg.vector_norm(exact).double()) ** 2


def relative_error(mixed: Tensor, exact: Tensor) -> float:
    """L2 distance over the norm of `exact`; infinite if the distance of `squares` is.

    NaN if no element can be compared.
    """
    return ratio(*squares(mixed, exact))


def ratio(distance: float, norm: float) -> float:
    """Relative error from squared distance and squared norm."""
    if distance == 0 or math.isnan(distance):
        return distance
    return math.sqrt(distance / norm) if norm > 0 and math.isfinite(distance) else math.inf


def _finite_in_float32(exact: Tensor) -> Tensor:
    return exact.abs() <= _FLOAT32.max


def _largest(value: Tensor) -> float:
    magnitudes = value.abs()[value.isfinite()]
    return float(magnitudes.max()) if magnitudes.numel() else 0.0


def _count(mask: Tensor) -> int:
    return int(mask.sum())


def _worst(values: Iterable[float]) -> float:
    """Return the largest value; NaN only if all are."""
    numbers = list(values)
    return max((value for value in numbers if not math.isnan(value)), default=math.nan if numbers else 0.0)
