"""Which torch functions compute something, by name: not views, writers, conversions or questions about a tensor."""

from __future__ import annotations

from functools import cache

import torch

from ampcompile.torch_private import dispatcher
from ampcompile.torch_private.types import OpOverload

from .passes.analysis import schema
from .torch_private import constants

# What Dynamo of torch 2.15 calls torch.Tensor's reflected operators, as `2 - x`: the name inside their decorator.
_REFLECTED = "wrapped"
_CONVERSIONS = frozenset({"to", "type", "type_as", "clone", "contiguous", "detach", "float", "double", "half"})


@cache
def _computing() -> frozenset[str]:
    found = {name for name in torch.nn.functional.__dict__ if name.islower() and not name.startswith("_")}
    found |= {name for name in torch.functional.__all__ if not name.startswith("_")}
    for name in dispatcher.all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        op = (
            getattr(getattr(torch.ops.aten, packet, None), overload or "default", None) if namespace == "aten" else None
        )
        if isinstance(op, OpOverload) and schema.computes(op):
            found.add(packet)
    return frozenset(name for name in found - _CONVERSIONS if not name.endswith("_")) | {_REFLECTED}


def computes(name: str) -> bool:
    """Whether a function of this `__name__` computes from its operands: `exp`, `linear`, `__matmul__`, `__radd__`."""
    if name.startswith("__") and name.endswith("__"):
        plain = name.strip("_")
        return not plain.startswith("i") and (plain in _computing() or plain.removeprefix("r") in _computing())
    return name in _computing()


constants.constant_when_traced(computes)
