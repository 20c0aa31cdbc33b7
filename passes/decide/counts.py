"""Find floating values that are lengths or positions: computed from integers alone, and converted to integers again.

bfloat16 doesn't hold all integers above 256, float16 not those above 2048: a sum computed as a product with ones, or a
number of samples computed from frames, is off by several there, and then indexes the wrong place.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ampcompile.passes.analysis.op_traits import CASTS, ROUNDS_TO_INTEGERS, draws_random_numbers, has
from ampcompile.torch_private.types import OpOverload

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def lengths(graph: Graph) -> set[Node]:
    """The counts that a rounding, or a conversion to integers, is computed from, back to the original integers."""
    counts: set[Node] = set()
    for node in graph.nodes:
        if _is_floating(node) and _is_count(node, counts):
            counts.add(node)
    ends = [node for node in graph.nodes if _makes_integers(node)]
    results: set[Node] = set()
    while ends:
        for operand in ends.pop().all_input_nodes:
            if operand in counts and operand not in results:
                results.add(operand)
                ends.append(operand)
    return results


def _is_floating(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_count(node: Node, counts: set[Node]) -> bool:
    """True if a floating value is a constant, or computed from integers, constants and counts alone."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    exact = all(operand in counts or not _is_floating(operand) for operand in node.all_input_nodes)
    return exact and not draws_random_numbers(node.target)


def _makes_integers(node: Node) -> bool:
    value = node.meta.get("val")
    to_integers = isinstance(value, torch.Tensor) and value.dtype in _INTEGERS
    return has(node.target, ROUNDS_TO_INTEGERS) or (to_integers and has(node.target, CASTS))
