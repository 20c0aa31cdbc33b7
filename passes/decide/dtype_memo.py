"""A call like an earlier one gives the same dtypes: in a deep model most calls are, and computing on fakes costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node, map_arg

from ampcompile.passes.analysis.schema import writes
from ampcompile.passes.graph import Decision
from ampcompile.torch_private import pytree
from ampcompile.torch_private.types import OpOverload

NUMBERS = (bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


class DtypeMemo:
    """The dtypes that calls gave. Of a shape it notes only whether it has dimensions: promotion asks no more."""

    def __init__(self) -> None:
        self._found: dict[str, list[Any]] = {}

    def result(self, node: Node, decision: Decision, values: Mapping[Node, Any], compute: Callable[[], Any]) -> Any:
        """The value a node had while tracing, if it has the dtypes that `compute` gives, else what that gives."""
        call = _call(node, decision, values)
        if call is not None and self._found.get(call) == _dtypes(node.meta.get("val")):
            return node.meta["val"]
        value = compute()
        if call is not None:
            self._found[call] = _dtypes(value)
        return prefer_traced(node, value)


def prefer_traced(node: Node, value: Any) -> Any:
    """The value a node had while tracing if `value` has its dtypes: what reads it is then known to be unchanged."""
    traced = node.meta.get("val")
    found = _dtypes(traced)
    return traced if found and found == _dtypes(value) else value


def _dtypes(value: Any) -> list[Any]:
    return [v.dtype if isinstance(v, torch.Tensor) else type(v) for v in pytree.tree_leaves(value)]


def _call(node: Node, decision: Decision, values: Mapping[Node, Any]) -> str | None:
    """All that the dtypes of a call's results depend on; None if more than dtypes may change, or operands are lists."""
    target = decision.target or node.target
    if not isinstance(target, OpOverload) or writes(target):
        return None
    if not all(isinstance(values[n], (torch.Tensor, *NUMBERS)) for n in node.all_input_nodes):
        return None

    def operand(n: Node) -> str:
        value = values[n]
        if not isinstance(value, torch.Tensor):
            return type(value).__name__
        to = decision.operands.get(n, value.dtype)
        return f"{type(value).__name__} {to} {value.device.type} {value.dim() == 0}"

    return repr((target, map_arg((node.args, node.kwargs), operand), dict(decision.arguments), decision.narrow))
