"""Cache the result dtypes of calls: in deep models most calls repeat an earlier one, and running fakes is slow."""

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
    """Result dtypes by call. Of a shape the key holds only whether it is 0-dim: promotion depends on no more."""

    def __init__(self) -> None:
        self._cached: dict[str, list[Any]] = {}

    def result(self, node: Node, decision: Decision, values: Mapping[Node, Any], compute: Callable[[], Any]) -> Any:
        """The node's traced value, if it has the dtypes that `compute` gives, else the result of `compute`."""
        key = _call(node, decision, values)
        if key is not None and self._cached.get(key) == _dtypes(node.meta.get("val")):
            return node.meta["val"]
        value = compute()
        if key is not None:
            self._cached[key] = _dtypes(value)
        return prefer_traced(node, value)


def prefer_traced(node: Node, value: Any) -> Any:
    """The node's traced value if `value` has the same dtypes, so that its readers can be recognized as unchanged."""
    traced = node.meta.get("val")
    traced_dtypes = _dtypes(traced)
    return traced if traced_dtypes and traced_dtypes == _dtypes(value) else value


def _dtypes(value: Any) -> list[Any]:
    return [v.dtype if isinstance(v, torch.Tensor) else type(v) for v in pytree.tree_leaves(value)]


def _call(node: Node, decision: Decision, values: Mapping[Node, Any]) -> str | None:
    """The cache key of a call; None if the call may change more than dtypes, or if operands are lists."""
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
