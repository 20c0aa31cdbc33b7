"""Apply a rule to one call of an op: which operands are cast, which arguments change, and why.

The dtypes of results are cached: in deep models most calls repeat an earlier one, and running fakes is slow.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node, map_arg

from ampcompile.errors import UnsupportedError
from ampcompile.passes.analysis import op_traits
from ampcompile.passes.graph import Decision, is_castable, op_name, source_line
from ampcompile.rules.table import Rule
from ampcompile.torch_private import dispatcher, pytree
from ampcompile.torch_private.dispatcher import OpOverload


@dataclass(frozen=True)
class Call:
    """One call of an op in a graph, with the fake values that arrive at it; autocast is on for `device_type`."""

    node: Node
    op: OpOverload
    values: Mapping[Node, Any]
    device_type: str

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The call's arguments, nodes included, by the names in the op's schema."""
        return op_traits.arguments_by_name(self.op, self.node.args, self.node.kwargs)

    @cached_property
    def arriving(self) -> list[torch.dtype]:
        """The dtypes of all tensor operands in the schema's order, tensor lists flattened."""
        values = (self.values[operand] for _, operand in op_traits.named_operands(self.node))
        return [value.dtype for value in values if isinstance(value, torch.Tensor)]

    def castable(self, keeps: tuple[str, ...] = ()) -> list[tuple[str, Node]]:
        """The operands that autocast may cast, each with its argument's name, without those that the op writes into."""
        excluded = {*keeps, *op_traits.written_arguments(self.op)}
        return [
            (name, operand)
            for name, operand in op_traits.named_operands(self.node)
            if name not in excluded
            and is_castable(value := self.values[operand])
            and value.device.type == self.device_type  # a CPU scalar of an op on an accelerator isn't
        ]


def decide(call: Call, rule: Rule, low: torch.dtype) -> Decision:
    """Apply a rule to one call, in a region whose low-precision dtype is `low`. Raises UnsupportedError."""
    if rule.category == "banned":
        raise UnsupportedError(
            f"{op_name(call.op)} at {source_line(call.node) or 'an unknown line'} is unsafe in mixed precision "
            f"({rule.because}). Use its numerically safe form, as torch.nn.functional.binary_cross_entropy_with_"
            "logits, or call it inside torch.autocast(device_type, enabled=False)."
        )
    if rule.asks_float32(call.arriving):
        return _ask_float32(call, rule)
    dtype = rule.operand_dtype(call.arriving, low)
    if dtype is None:
        return Decision(rule.because)
    wanted = {operand: dtype for _, operand in call.castable(rule.keeps)}
    wanted |= _follow_leaders(call, rule, dtype)
    operands = {operand: to for operand, to in wanted.items() if call.values[operand].dtype != to}
    dropped = dict.fromkeys(rule.drops) if operands else {}
    narrow = rule.result_dtype(call.arriving, low)
    return Decision(rule.because, operands=operands, arguments=dropped, narrow=narrow)


def _ask_float32(call: Call, rule: Rule) -> Decision:
    if rule.redispatch:
        target = dispatcher.op_named(rule.redispatch)
        return Decision(rule.because, target=target, arguments=_fill_defaults(call, target) | {"dtype": torch.float32})
    if call.arguments.get("dtype") is not None:
        return Decision("the user asked for a dtype")
    return Decision(rule.because, arguments={"dtype": torch.float32})


def _fill_defaults(call: Call, target: OpOverload) -> dict[str, Any]:
    """Defaults that the call relies on and that `target`, the overload called instead, doesn't have."""
    needed = {argument.name for argument in op_traits.arguments_of(target) if not argument.has_default_value()}
    defaults = {a.name: a.default_value for a in op_traits.arguments_of(call.op) if a.has_default_value()}
    return {name: value for name, value in defaults.items() if name in needed and name not in call.arguments}


def _follow_leaders(call: Call, rule: Rule, dtype: torch.dtype) -> dict[Node, torch.dtype]:
    """Operands that take the final dtype of another operand, as attention's mask takes the query's."""
    followers = {}
    for name, leader in rule.follows:
        argument, lead = call.arguments.get(name), call.arguments.get(leader)
        if isinstance(argument, Node) and isinstance(lead, Node) and is_castable(call.values[argument]):
            followers[argument] = dtype if is_castable(call.values[lead]) else call.values[lead].dtype
    return followers


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
    if not isinstance(target, OpOverload) or op_traits.writes(target):
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
