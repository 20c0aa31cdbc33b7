"""Ops that commute with casts: they only move numbers, or choose among them, so casting first gives the same bits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ampcompile.dtypes import is_lossless
from ampcompile.passes.graph import call_on_values
from ampcompile.torch_private.dispatcher import OpOverload

from .op_traits import CHOOSES, CONVERSIONS, MOVES, REPEATS, arguments_by_name, has, name_of, reads_bits

CAST = torch.ops.aten.to.dtype
CONVERT = torch.ops.prims.convert_element_type.default  # the op of casts after differentiation
_KINDS = ((MOVES, "moves"), (REPEATS, "repeats"), (CHOOSES, "chooses"))


def classify_movement(node: object) -> str:
    """Classify how an op treats the numbers of its first operand: "moves", "repeats" or "chooses"; "" for other ops.

    Also "" for an op that binds a size or an offset known at run time only: a second call would bind another symbol.
    """
    op = node.target if isinstance(node, Node) else None
    if not isinstance(op, OpOverload) or reads_bits(op):
        return ""
    assert isinstance(node, Node)
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or node.meta.get("unbacked_bindings"):
        return ""
    if name_of(op) == "aten::masked_fill" and _shape(value) != _shape(node.args[0].meta["val"]):
        return "repeats"
    return next((kind for trait, kind in _KINDS if has(op, trait)), "")


def constants_survive(node: Node, dtype: torch.dtype) -> bool:
    """True if the constants of an op that moves or chooses numbers are exact in another dtype."""
    assert isinstance(node.target, OpOverload)
    return all(_survives(value, dtype) for value in _constants(node, node.target))


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two values have the same strides, compared as text: comparing symbols would add a guard."""
    return [str(stride) for stride in a.stride()] == [str(stride) for stride in b.stride()]


def cast_dtypes(node: Node) -> tuple[torch.dtype, torch.dtype] | None:
    """The dtypes before and after a cast to a floating type that changes nothing else; None for other nodes."""
    if not has(node.target, CONVERSIONS) or not isinstance(node.args[0], Node):
        return None
    before, after = node.args[0].meta["val"], node.meta["val"]
    # A cast of integers counts only if the floating type holds all values of the integer type.
    numbers = before.is_floating_point() or is_lossless(before.dtype, after.dtype)
    alike = before.device == after.device and same_layout(before, after)
    return (before.dtype, after.dtype) if numbers and after.is_floating_point() and alike else None


def is_cast(node: Node) -> bool:
    """True if a node changes its operand's dtype, and nothing else about it; see `cast_dtypes`."""
    dtypes = cast_dtypes(node)
    return dtypes is not None and dtypes[0] != dtypes[1]


def _shape(value: torch.Tensor) -> list[str]:
    return [str(size) for size in value.shape]


def _constants(node: Node, op: OpOverload) -> list[Any]:
    """The constants of a call that are compared with the operand's numbers, or stand among them."""
    given = arguments_by_name(op, node.args, node.kwargs)
    match name_of(op):
        case "aten::clamp":
            return [bound if bound != 0 else "a zero of some sign" for bound in (given.get("min"), given.get("max"))]
        case "aten::pad" if (mode := given.get("mode", "constant")) != "constant":
            return [mode]
        case "aten::masked_fill" | "aten::pad" | "aten::constant_pad_nd":
            return [given.get("value")]  # without one, what is padded is zero
        case _:
            return []


def _survives(value: Any, dtype: torch.dtype) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and torch.tensor(value, dtype=dtype, device="cpu").double().item() == value


def look_through(value: Any, moves: Callable[[Node], object]) -> tuple[Any, list[Node]]:
    """Follow first operands back while `moves(node)` holds: the value behind those nodes, and the nodes in order."""
    path: list[Node] = []
    while isinstance(value, Node) and moves(value):
        path.insert(0, value)
        value = value.args[0]
    return value, path


def rebuild(path: Sequence[Node], operand: Node) -> Node:
    """Insert copies of the ops of `path` at the insertion point, applied in order to another first operand."""
    for node in path:
        copy = node.graph.node_copy(node)
        copy.args = (operand, *node.args[1:])
        copy.meta = {**node.meta, "val": call_on_values(copy)}
        operand = copy
    return operand
