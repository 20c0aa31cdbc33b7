"""One run on file: what every op gave, as a few numbers each, and what the compiled call itself returned."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampcompile.errors import AuditError

from . import table
from .records import Place

FORMAT = "ampcompile recording 1"
DIRECTIONS = 8
"""Projections in a fingerprint."""
_MIXERS = (-7046029254386353131, 1181783497276652981)  # odd 64-bit factors


@dataclass(frozen=True)
class Step:
    """An input of a run (its `op` is "input" and the name), or an op that computes, in the order in which they ran."""

    place: Place
    dtype: str
    """As `bf16`, of its first floating result."""
    shape: tuple[int, ...]
    exact: tuple[float, ...]
    """Fingerprint of the run in float64 there: norm, then projections on fixed directions."""
    alone: float | None
    """Error of this op alone, against float64 on its own operands; None if no kernel computes it in float64."""
    from_start: float | None
    """Error against the run in float64 from the start."""
    length: float
    """How many numbers each number of the result is a sum of, about."""
    operands: tuple[int, ...]
    """The steps that it reads, by number, as far as they are in the same graph."""


@dataclass(frozen=True)
class Returned:
    """An output of the call, or a gradient: its distance from the run in float64, relative."""

    ops: float
    """Of the ops run one by one."""
    call: float
    """Of the compiled call itself."""
    elements: int


@dataclass(frozen=True)
class Recording:
    """The result of `ampcompile.record`: numbers and names of one run, to `save` and `compare`. `str` is a table."""

    about: Mapping[str, str]
    """Versions, device and options."""
    steps: Sequence[Step]
    results: Mapping[str, Returned]
    """By name, as `output 0` and `gradient of head.weight`."""

    def __str__(self) -> str:
        return table.render_recording(self)

    def save(self, path: str | Path) -> None:
        """Write the recording as JSON, about 500 bytes for each op."""
        Path(path).write_text(json.dumps({"format": FORMAT, **asdict(self)}), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Read what `save` wrote, as data alone. Raises AuditError for another file."""
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
            if read["format"] != FORMAT:
                raise ValueError(read["format"])
            steps = [_step(step) for step in read["steps"]]
            return cls(read["about"], steps, {name: Returned(**r) for name, r in read["results"].items()})
        except (ValueError, KeyError, TypeError) as error:
            raise AuditError(
                f"found {path}, which is no recording that this version reads ({error}); expected a file written by "
                "ampcompile.record(model)(x).save(path). Record the run again."
            ) from error


def _step(read: dict[str, Any]) -> Step:
    tuples: dict[str, Any] = {name: tuple(value) for name, value in read.items() if isinstance(value, list)}
    return Step(**read | tuples | {"place": Place(**read["place"])})


def fingerprint(value: Tensor) -> tuple[float, ...]:
    """Return the norm of a tensor, and its projections on directions that depend on its number of elements alone.

    Elements that aren't finite count as 0. Equal numbers in another layout, or on another device, give equal results up
    to float64's rounding.
    """
    flat = (torch.view_as_real(value) if value.is_complex() else value).detach().reshape(-1).double()
    flat = torch.where(flat.isfinite(), flat, 0)
    bits = torch.arange(1, len(flat) + 1, device=flat.device)
    for factor in _MIXERS:  # wraps around
        bits = bits * factor
        bits = bits ^ (bits >> 29)
    projections = [float(flat @ ((bits >> 7 + i & 1) * 2 - 1).double()) for i in range(DIRECTIONS)]
    return float(torch.linalg.vector_norm(flat)), *projections


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the relative L2 distance of two tensors, estimated from their fingerprints."""
    squares = [(x - y) ** 2 for x, y in zip(a[1:], b[1:], strict=True)]
    norm = max(a[0], b[0])
    return (sum(squares) / len(squares)) ** 0.5 / norm if norm else 0.0
