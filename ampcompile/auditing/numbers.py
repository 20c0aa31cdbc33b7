"""How far the numbers of a mixed run are from exact ones: relative error, overflow, flush to zero."""

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
    """What was seen of some floating values. Errors are L2 distances over L2 norms, None where nothing was compared."""

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


def measure(found: Sequence[Tensor], local: Sequence[Tensor] | None, exact: Sequence[Tensor] | None) -> Numbers:
    """The numbers of one op's results; `local` and `exact` are in high precision."""
    elements = sum(value.numel() for value in found)
    pairs = list(zip(found, local, strict=True)) if local is not None else []
    return Numbers(
        local=_worst(relative_error(f, e) for f, e in pairs) if local is not None else None,
        cumulative=(
            _worst(relative_error(f, e) for f, e in zip(found, exact, strict=True)) if exact is not None else None
        ),
        largest=_worst(_largest(value) for value in found),
        overflowed=sum(_count(~f.isfinite() & _finite_in_float32(e)) for f, e in pairs) / max(elements, 1),
        flushed=sum(_count((f == 0) & (e.abs() >= _SMALLEST)) for f, e in pairs) / max(elements, 1),
        elements=elements,
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
        overflowed=sum(part.overflowed * part.elements for part in parts) / max(elements, 1),
        flushed=sum(part.flushed * part.elements for part in parts) / max(elements, 1),
        elements=elements,
    )


def squares(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """Squared L2 distance, and squared norm of `exact`, over the elements that are finite in float32."""
    kept = _finite_in_float32(exact)
    exact = torch.where(kept, exact, 0)
    apart = torch.where(kept, found.to(exact.dtype), 0) - exact
    distance = float(torch.linalg.vector_norm(apart).double())
    return (distance**2 if math.isfinite(distance) else math.inf), float(torch.linalg.vector_norm(exact).double()) ** 2


def relative_error(found: Tensor, exact: Tensor) -> float:
    """L2 distance over the norm of `exact`; infinite if something isn't finite that should be."""
    return ratio(*squares(found, exact))


def ratio(distance: float, norm: float) -> float:
    """A relative error from squares."""
    if distance == 0:
        return 0.0
    return math.sqrt(distance / norm) if norm > 0 and math.isfinite(distance) else math.inf


def _finite_in_float32(exact: Tensor) -> Tensor:
    return exact.abs() <= _FLOAT32.max


def _largest(value: Tensor) -> float:
    magnitudes = value.abs()[value.isfinite()]
    return float(magnitudes.max()) if magnitudes.numel() else 0.0


def _count(mask: Tensor) -> int:
    return int(mask.sum())


def _worst(values: Iterable[float]) -> float:
    return max(values, default=0.0)
