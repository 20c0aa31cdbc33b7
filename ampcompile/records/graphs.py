"""Records of values, casts and graphs, with what was measured of each. They hold no tensor and no graph."""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from ampcompile.dtypes import short_name
from ampcompile.passes.base import Applied

Shape = tuple[int | str, ...]
PER_UPDATE = "once per update"
INSERTED, BACKWARD = "insert_casts", "differentiated: backward"
"""The stages at which forward and backward have the casts that eager autocast places."""
JOINT = "forward and backward"  # the end of the names of stages after differentiation


@dataclass(frozen=True, kw_only=True)
class Record:
    """A value of a graph: the op that computes it, and the place of that op."""

    op: str
    """The op, as `aten.mm`; of an inserted cast, the op it was inserted for."""
    module: str = ""
    """Path of the module that calls the op, or whose op it differentiates; empty outside of modules."""
    source: str = ""
    """The user's line, `file:line`."""
    backward: bool = False
    """True if the op computes gradients."""
    shape: Shape = ()
    """Of the (first) result; symbolic sizes are strings."""
    because: str = ""
    """The reason for the dtype."""
    name: str = ""
    """The value's name in its graph; names in a body begin with the body's name."""
    reads: tuple[str, ...] = ()
    """The names of the values that the op reads."""

    @property
    def title(self) -> str:
        """The op, and that it computes gradients if it does."""
        return f"{self.op} (backward)" if self.backward else self.op

    @property
    def line(self) -> str:
        """The user's line, without the folder."""
        return os.path.basename(self.source)

    @property
    def sizes(self) -> str:
        """The shape as `8x16`."""
        return "x".join(map(str, self.shape)) or "scalar"

    def __str__(self) -> str:
        return f"{self.title} in {self.module or 'no module'}, {self.line or 'unknown line'}"


@dataclass(frozen=True)
class Numbers:
    """Measurements of floating values. Errors are L2 distances over L2 norms, None where nothing was compared.

    They are NaN where no element is a finite number in both runs.
    """

    local: float | None
    """Error of each op alone, against the same op in high precision on the mixed run's own operands."""
    cumulative: float | None
    """Error against a run in high precision from the start."""
    largest: float = 0.0
    """The largest finite magnitude."""
    overflowed: float = 0.0
    """Share of the elements that aren't finite where float32 would give a finite number, of the op alone."""
    flushed: float = 0.0
    """Share of the elements that are zero where float32 would give another number, of the op alone."""
    elements: int = 0
    ops: int = 1
    """The number of ops."""
    not_finite: float = 0.0
    """Share of the elements that are NaN in either run, or infinite in one alone."""

    @property
    def badness(self) -> tuple[bool, float, float]:
        """The key by which modules and ops are sorted, the worst last."""
        local = self.local or 0.0
        return self.overflowed > 0, self.flushed, 0.0 if math.isnan(local) else local


@dataclass(frozen=True, kw_only=True)
class OpRecord(Record):
    """An op on tensors, and the dtype in which it computes."""

    dtype: torch.dtype | None = None
    """Dtype of the result if floating, else of the first floating operand, else of the result."""
    known: bool = True
    """False if the op is unknown to the policy."""
    numbers: Numbers = Numbers(None, None)
    """The measurements of an audit or a recording."""
    fingerprint: tuple[float, ...] = ()
    """Of the result in float64, in a recording: its norm, and its projection on a fixed direction."""
    length: float = 0.0
    """In a recording: how many numbers each number of the result is a sum of, about."""

    @property
    def in_dtype(self) -> str:
        """The dtype as `bf16`; empty if there is none."""
        return short_name(self.dtype) if self.dtype is not None else ""


_REMOVED = ("shared", "folded", "fused", "quantized")


@dataclass(frozen=True, kw_only=True)
class CastRecord(Record):
    """A cast that ampcompile inserted, or a conversion that runs in backward."""

    dtype_from: torch.dtype
    dtype_to: torch.dtype
    bytes: int
    """Bytes read and written by the cast alone; symbolic sizes count as the sizes they were compiled for."""
    fate: tuple[str, ...] = ()
    """The changes that passes made to it, in order: inserted, hoisted, shared, folded, fused, quantized; empty in
    backward."""
    of: str
    """The kind of value cast: "weight", "bias", "input", "constant" or "activation"; in backward "gradient", or the op
    that made it."""

    @property
    def dtypes(self) -> str:
        """Both dtypes, as `f32>bf16`."""
        return f"{short_name(self.dtype_from)}>{short_name(self.dtype_to)}"

    @property
    def runs(self) -> bool:
        """True if it still runs as a separate cast in every call."""
        return not self.backward and not {"hoisted", *_REMOVED} & set(self.fate)

    @property
    def when(self) -> str:
        """When it runs: "every call", "once per update" of a weight, "backward"; or how it became part of another."""
        if self.backward or self.runs:
            return "backward" if self.backward else "every call"
        return next((fate for fate in self.fate if fate in _REMOVED), PER_UPDATE)


@dataclass(frozen=True, kw_only=True)
class SavedRecord(Record):
    """A value that backward keeps, or the memory of which it keeps a part. `because` says what reads it in backward."""

    dtype: torch.dtype
    kept_as: torch.dtype
    """The dtype in which it is kept."""
    bytes: int
    """Bytes of its memory; symbolic sizes count as the sizes they were compiled for."""
    of: str
    """The kind of value: "activation", or "result" if it is also returned; "weight", "copy" of one, "input" or
    "constant", which are alive anyway."""
    error: float | None = None
    """In an audit: relative error of a value kept in 8 bits alone, of all its calls the worst; 0 of others."""

    @property
    def alive_anyway(self) -> bool:
        """True if its memory is alive also without backward, and without a caller that holds results."""
        return self.of not in ("activation", "result")


@dataclass(frozen=True)
class Total:
    """Conversions of one call at one stage, the user's own included. `bytes`: read and written by them."""

    stage: str
    casts: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class GraphRecord:
    """One graph that Dynamo found."""

    precision: str
    """Precision by device type; for a graph that is left to autocast also the reason."""
    reason: str = ""
    """Why a graph break ends it; empty if the function ends there."""
    code: str = field(default="", repr=False)
    joint_code: str = field(default="", repr=False)
    """Forward and backward as one graph, after the passes on it; without gradients, forward alone."""
    casts: tuple[CastRecord, ...] = ()
    """The casts inserted, in order."""
    backward_casts: tuple[CastRecord, ...] = ()
    """The conversions that run in backward."""
    values: tuple[OpRecord, ...] = ()
    """The ops in order, bodies of higher-order ops after their caller's; and what each returns, as `output`."""
    history: tuple[Applied, ...] = field(default=(), repr=False)
    totals: tuple[Total, ...] = ()
    """Conversions in the graph after each pass, then after differentiation."""
    products: tuple[int, int] = (0, 0)
    """The products after differentiation that a CPU runs in float32, and all of them."""
    saved: tuple[SavedRecord, ...] = ()
    """What backward keeps, as the lowering chosen cuts the graph."""
    peaks: tuple[tuple[float, int], ...] = ()
    """Under a budget: it and larger ones, with the most bytes that forward and backward then hold at once."""
    left: bool = False
    """True if the graph is left to autocast: it then has no records of ops and casts."""

    @property
    def ops(self) -> list[OpRecord]:
        """The ops on tensors, in order."""
        return [value for value in self.values if value.op != "output"]


def add_up(stage: str, casts: Iterable[CastRecord]) -> Total:
    """The total of these casts."""
    sizes = [cast.bytes for cast in casts]
    return Total(stage, len(sizes), sum(sizes))


def plain(value: Any) -> Any:
    """Return records, and what holds them, as plain data for JSON: dtypes as `bf16`, without long texts."""
    if is_dataclass(value):
        return {part.name: plain(getattr(value, part.name)) for part in fields(value) if part.repr}
    if isinstance(value, torch.dtype):
        return short_name(value)
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if hasattr(value, "_asdict"):  # a NamedTuple
        return plain(value._asdict())
    if isinstance(value, str | int | float | None):
        return value
    return [plain(item) for item in value] if isinstance(value, Iterable) else str(value)
