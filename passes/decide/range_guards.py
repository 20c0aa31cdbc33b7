"""Keep ops in float32 whose constants a low type would turn into infinity or zero, or whose counts it would round.

Counts are floating values computed from integers alone, and converted to integers again: lengths and positions.
bfloat16 doesn't hold all integers above 256, float16 not those above 2048: a sum computed as a product with ones, or a
number of samples computed from frames, is off by several there, and then indexes the wrong place.
"""

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from ampcompile.dtypes import LOW, representable, short_name, widest
from ampcompile.passes.analysis import schema
from ampcompile.passes.analysis.op_traits import CASTS, ROUNDS_TO_INTEGERS, WRITES_CONSTANTS, draws_random_numbers, has
from ampcompile.passes.graph import Decision, is_castable
from ampcompile.torch_private.dispatcher import OpOverload

from .decisions import Call

# Types of the arguments whose numbers are converted to the operands' dtype.
_ELEMENTS = ("number", "Optional[number]", "Tensor", "Optional[Tensor]")
# Types of the arguments that a kernel uses in float32, where they can't become zero (eps, p). One that is too large for
# the operands' dtype is guarded all the same: it is meant for an element, as the fill value of `pad`.
_FLOAT_ARGUMENTS = ("float", "Optional[float]")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def guard(call: Call, decision: Decision, constants: Mapping[Node, float], lengths: Set[Node]) -> Decision:
    """Return the decision, or one that keeps the call's constants finite and nonzero, and its counts exact.

    `constants`: the largest finite magnitude in each constant tensor. `lengths`: the counts that become integers again.
    An op that writes into its operand can't widen it: the numbers it writes are clamped to the operand's range.
    """
    if has(call.op, WRITES_CONSTANTS):
        return _clamp(call, decision, constants, call.arriving[0])
    dtype = _computes_in(call, decision)
    if dtype not in LOW or schema.writes(call.op):
        return decision
    if call.node in lengths:
        return _in_float32(call, f"range guard: a length or position, which {short_name(dtype)} doesn't count exactly")
    for name, value in (*_numbers(call, dtype), *_tensors(decision, constants)):
        if not representable(value, dtype):
            return _in_float32(call, f"range guard: {name}={value:g} doesn't fit {short_name(dtype)}")
    return decision


def _in_float32(call: Call, because: str) -> Decision:
    wide = {n: torch.float32 for _, n in call.castable() if call.values[n].dtype != torch.float32}
    return Decision(because, operands=wide)


def _computes_in(call: Call, decision: Decision) -> torch.dtype | None:
    if decision.arguments.get("dtype") is not None:
        return None
    operands = {n: v.dtype for n in call.node.all_input_nodes if is_castable(v := call.values[n])}
    return widest((operands | dict(decision.operands)).values())


def _numbers(call: Call, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    for argument in schema.arguments_of(call.op):
        value = call.arguments.get(argument.name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            continue
        too_large = str(argument.type) in _FLOAT_ARGUMENTS and abs(value) > torch.finfo(dtype).max
        if too_large or str(argument.type) in _ELEMENTS:
            yield argument.name, float(value)


def _tensors(decision: Decision, constants: Mapping[Node, float]) -> Iterator[tuple[str, float]]:
    return ((operand.name, constants[operand]) for operand in decision.operands if operand in constants)


def _clamp(call: Call, decision: Decision, constants: Mapping[Node, float], dtype: torch.dtype) -> Decision:
    if dtype not in LOW:
        return decision
    largest = torch.finfo(dtype).max
    numbers = {name: math.copysign(largest, v) for name, v in _numbers(call, dtype) if abs(v) > largest}
    tensors = {n: largest for n in call.node.all_input_nodes if constants.get(n, 0.0) > largest}
    if not numbers and not tensors:
        return decision
    names = ", ".join((*numbers, *(n.name for n in tensors)))
    because = f"range guard: {names} doesn't fit {short_name(dtype)}, whose largest number is written"
    return replace(decision, because=because, arguments={**decision.arguments, **numbers}, clamps=tensors)


def lengths(graph: Graph) -> set[Node]:
    """The counts of a graph that become integers again, by a rounding or a conversion, or lead to such a count."""
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
