"""Records that no graph stands behind, to print."""

from typing import Any

import torch

from ampcompile.records.graphs import CastRecord, GraphRecord, OpRecord


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
    return CastRecord(op=op, **(given | fields))


def op(name: str, **fields: Any) -> OpRecord:
    return OpRecord(op=name, **{"module": "m", "source": "/home/me/model.py:3", "dtype": torch.float32} | fields)


def graph(precision: str = "cpu in bf16", **fields: Any) -> GraphRecord:
    return GraphRecord(precision=precision, **fields)
