"""How far the numbers of a mixed run are from exact ones: relative error, overflow, flush to zero, NaN."""

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
    """What was seen of some floating values. Errors are L2 distances over L2 norms, None where nothing was compared.

    They are NaN where no element is a finite number in both runs.
    """

    local: float | None
    """Each op alone: against the same op in high precision on the mixed run's own inputs."""
    cumulative: float | None
    """Against a run in high precision from the start."""
    largest: float
    """The largest finite magnitude."""
    overflowed: float
    """Share of the elements that are no finite number where float32 would have one, of the op alone."""
    flushed: float
    """Share of the elements that are zero where float32 would have another number, of the op alone."""
    elements: int
    not_finite: float = 0.0
    """Share of the elements that are NaN or infinite in the mixed run, without the infinities that both runs have."""
    not_finite_exact: float = 0.0
    """The same in the run in high precision."""


def measure(found: Sequence[Tensor], local: Sequence[Tensor] | None, exact: Sequence[Tensor] | None) -> Numbers:
    """The numbers of one op's results; `local` and `exact` are in high precision."""
    elements = sum(value.numel() for value in found)
    pairs = list(zip(found, local, strict=True)) if local is not None else []
    other = exact if exact is not None else local
    masks = [find_not_finite(f, e) for f, e in zip(found, other or found, strict=True)]
    return Numbers(
        local=_worst(relative_error(f, e) for f, e in pairs) if local is not None else None,
        cumulative=(
            _worst(relative_error(f, e) for f, e in zip(found, exact, strict=True)) if exact is not None else None
        ),
        largest=_worst(_largest(value) for value in found),
        overflowed=sum(_count(~f.isfinite() & _finite_in_float32(e)) for f, e in pairs) / max(elements, 1),
        flushed=sum(_count((f == 0) & (e.abs() >= _SMALLEST)) for f, e in pairs) / max(elements, 1),
        elements=elements,
        not_finite=sum(_count(mixed) for mixed, _ in masks) / max(elements, 1),
        not_finite_exact=sum(_count(high) for _, high in masks if other is not None) / max(elements, 1),
    )


def combine(parts: Sequence[Numbers]) -> Numbers:
    """Several as one: the worst errors, shares of all elements."""
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


def find_not_finite(found: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Where the mixed run, and where the exact run, has NaN or an infinity that the other doesn't have."""
    same_sign = torch.ones_like(found, dtype=torch.bool) if found.is_complex() else found.sign() == exact.sign()
    alike = found.isinf() & (exact.abs() > _FLOAT32.max) & same_sign
    return ~found.isfinite() & ~alike, ~exact.isfinite() & ~alike


def squares(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """Squared L2 distance, and squared norm of `exact`, over the elements that are finite in float32.

    NaN where there is none of them; an infinite distance where a run alone has something finite.
    """
    kept = _finite_in_float32(exact)
    lost = bool((found.isfinite() & ~exact.isfinite()).any())
    if kept.numel() and not lost and not kept.any():
        return math.nan, math.nan
    exact = torch.where(kept, exact, 0)
    apart = torch.where(kept, found.to(exact.dtype), 0) - exact
    distance = float(torch.linalg.vector_norm(apart).double())
    distance = math.inf if lost else distance
    return (distance**2 if math.isfinite(distance) else math.inf), float(torch.linalg.vector_norm(exact).double()) ** 2


def relative_error(found: Tensor, exact: Tensor) -> float:
    """L2 distance over the norm of `exact`; infinite if something isn't finite that should be, or the other way round.

    NaN if no element can be compared.
    """
    return ratio(*squares(found, exact))


def ratio(distance: float, norm: float) -> float:
    """A relative error from squares."""
    if distance == 0 or math.isnan(distance):
        return distance
    return math.sqrt(distance / norm) if norm > 0 and math.isfinite(distance) else math.inf


def known(error: float | None) -> float:
    """An error to sort and add by: 0 where nothing was compared."""
    return 0.0 if error is None or math.isnan(error) else error


def _finite_in_float32(exact: Tensor) -> Tensor:
    return exact.abs() <= _FLOAT32.max


def _largest(value: Tensor) -> float:
    magnitudes = value.abs()[value.isfinite()]
    return float(magnitudes.max()) if magnitudes.numel() else 0.0


def _count(mask: Tensor) -> int:
    return int(mask.sum())


def _worst(values: Iterable[float]) -> float:
    """The largest; NaN counts only where all are."""
    found = list(values)
    return max((value for value in found if not math.isnan(value)), default=math.nan if found else 0.0)
