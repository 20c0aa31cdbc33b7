"""Records that no graph stands behind, to print."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ampcompile.records.casts import CastRecord, GraphRecord, OpRecord


def cast(op: str = "aten.linear", **fields: Any) -> CastRecord:
    """A cast of a weight that runs in every call."""
    given = {
        "module": "blocks.0.up",
        "source": "/home/me/model.py:7",
        "dtype_from": torch.float32,
        "dtype_to": torch.bfloat16,
        "shape": (2, 3),
        "bytes": 36,
        "because": "the list",
        "fate": ("inserted",),
        "of": "weight",
    }
    return CastRecord(op, **(given | fields))


def graph(
    precision: str, ops: tuple[OpRecord, ...] = (), casts: Mapping[int, CastRecord] | None = None
) -> Callable[..., GraphRecord]:
    """A graph's record, to be called with its other fields."""

    def with_fields(code: str = "", reason: str = "", totals: Any = (), **fields: Any) -> GraphRecord:
        return GraphRecord(precision, reason, code, casts or {}, ops, (), (), totals, **fields)

    return with_fields
