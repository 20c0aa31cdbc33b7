"""Which floating values of a graph are lengths or positions: made of integers alone, and made integers of again.

Counts above 256 have no exact form in bfloat16, above 2048 none in float16: a sum taken by a product with ones, frames
turned into samples, are off by several there, and what they index is another place.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ampcompile.passes.analysis.op_traits import CASTS, ROUNDS_TO_INTEGERS, draws_random_numbers, has
from ampcompile.torch_private.types import OpOverload

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def lengths(graph: Graph) -> set[Node]:
    """The values that a rounding, or a conversion to integers, is made from, back to the integers they come of."""
    counts: set[Node] = set()
    for node in graph.nodes:
        if _is_floating(node) and _is_count(node, counts):
            counts.add(node)
    ends = [node for node in graph.nodes if _makes_integers(node)]
    found: set[Node] = set()
    while ends:
        for operand in ends.pop().all_input_nodes:
            if operand in counts and operand not in found:
                found.add(operand)
                ends.append(operand)
    return found


def _is_floating(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_count(node: Node, counts: set[Node]) -> bool:
    """Whether a floating value is a constant, or computed from integers, constants and counts alone."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    known = all(operand in counts or not _is_floating(operand) for operand in node.all_input_nodes)
    return known and not draws_random_numbers(node.target)


def _makes_integers(node: Node) -> bool:
    value = node.meta.get("val")
    to_integers = isinstance(value, torch.Tensor) and value.dtype in _INTEGERS
    return has(node.target, ROUNDS_TO_INTEGERS) or (to_integers and has(node.target, CASTS))
