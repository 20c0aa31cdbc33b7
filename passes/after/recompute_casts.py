"""Save fewer bytes for backward: save the low value that a cast widened, and widen it again in backward.

torch itself never recomputes a cast that backward's products or losses read. Here it does, and what the cast widened is
saved, in the low type, in two cases: if a product reads it, as torch saves it where products run in 16 bits; and if it
could be computed again from an input, as an optimizer may write a weight before backward runs, without a version bump.

Nor does torch recompute a norm's normalized numbers, though the norm's operand is in memory anyway, for the next layer
or the residual: it would write the normalized numbers for backward alone, as float32.

On CPUs, the masks that the backward of ReLU reads are computed again too. A mask has half the bytes of 16-bit numbers,
but Inductor's loops write masks element by element: those of LeNet-5 took 1.4 of a step's 5.8 ms (batch 32, an AMD EPYC
core).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ampcompile.dtypes import LOW, is_lossless
from ampcompile.passes.analysis.aliasing import base_of
from ampcompile.passes.analysis.op_traits import (
    CHOOSES_AFTER,
    CONVERSIONS_AFTER,
    PRODUCTS_AFTER,
    arguments_by_name,
    draws_random_numbers,
    has,
)
from ampcompile.passes.analysis.readers import computed_from_gradients, readers_of
from ampcompile.passes.base import EachGraph
from ampcompile.passes.graph import is_float_tensor
from ampcompile.torch_private.cuts import budget_of, keep_what_is_marked

ATEN = torch.ops.aten
_TAG = "recompute"  # torch's own mark, which checkpoints set too; differentiation keeps it


def _tag(cast: Node) -> bool:
    tagged = _TAG not in cast.meta  # a checkpoint has decided already
    cast.meta.setdefault(_TAG, CheckpointPolicy.PREFER_RECOMPUTE)
    return tagged


def _save(values: Iterable[Node]) -> None:
    for value in values:
        value.meta.setdefault(_TAG, CheckpointPolicy.MUST_SAVE)


def _computed_from_inputs(gm: GraphModule, *end: object) -> set[Node]:
    """The inputs, and what torch might compute again from one: all that no product, or op of `end`, stands before."""
    from_inputs: set[Node] = set()
    for node in gm.graph.nodes:
        ends = has(node.target, PRODUCTS_AFTER) or node.target in end
        again = not ends and not from_inputs.isdisjoint(node.all_input_nodes)
        if node.op == "placeholder" or again:
            from_inputs.add(node)
    return from_inputs


def _operands(backward: set[Node]) -> set[Node]:
    """What forward computes and backward's products read, and what that is widened from."""
    read = {
        base_of(operand) for node in backward if has(node.target, PRODUCTS_AFTER) for operand in node.all_input_nodes
    }
    read |= {base_of(operand.args[0]) for operand in read if _widens(operand)}
    tensors = {
        operand for operand in read - backward if isinstance(operand.meta.get("val"), torch.Tensor | tuple | list)
    }
    return {operand for operand in tensors if operand.op != "placeholder"}


def _tag_normed(node: Node, of_inputs: set[Node]) -> bool:
    """Tag the steps with which a norm applies its row statistics, and the casts that widen what they read."""
    if node.target is not ATEN.mul.Tensor or _TAG in node.meta:
        return False
    shifted, scale = node.args
    if not isinstance(scale, Node) or base_of(scale).target is not ATEN.rsqrt.default:
        return False
    steps = [node, shifted] if shifted.target is ATEN.sub.Tensor else [node]
    read = {base_of(operand) for step in steps for operand in step.all_input_nodes} - {*steps}
    if any(operand.op == "placeholder" for operand in read):
        return False
    widened = {operand for operand in read if _widens(operand)}
    for again in {*steps} | widened:
        again.meta.setdefault(_TAG, CheckpointPolicy.PREFER_RECOMPUTE)
    _save((read - widened | {base_of(operand.args[0]) for operand in widened}) & of_inputs)
    return True


def _is_mask(node: Node) -> bool:
    """True for a mask on a CPU: the comparison of 16-bit results of ReLU, or of a similar op, with the op's limit."""
    if node.target is not ATEN.le.Scalar or _TAG in node.meta:
        return False
    chosen = base_of(node.args[0])
    value = chosen.meta["val"]
    return has(chosen.target, CHOOSES_AFTER) and value.device.type == "cpu" and value.dtype in LOW


def _draws(node: Node) -> bool:
    """True for random numbers, and for attention that drops some."""
    drawn = draws_random_numbers(node.target)
    return drawn and arguments_by_name(node.target, node.args, node.kwargs).get("dropout_p") != 0


def _widens(node: Node) -> bool:
    if not has(node.target, CONVERSIONS_AFTER):
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]
    if base_of(node.args[0]).op == "placeholder" or not is_float_tensor(before):
        return False
    return after.itemsize > before.itemsize and is_lossless(before.dtype, after.dtype)


@dataclass(frozen=True)
class RecomputeCasts(EachGraph):
    """For a joint graph: an inference graph saves no values. Returns the casts, normalized values and masks tagged.

    Under a budget below 1 torch chooses by itself, as under Inductor: only draws are tagged, which it would draw anew.
    """

    name = "recompute_casts"

    def rewrite(self, gm: GraphModule) -> int:
        if budget_of(gm) < 1:
            if draws := [node for node in gm.graph.nodes if _draws(node)]:
                _save(draws)
                keep_what_is_marked(gm)
            return 0
        if not (backward := computed_from_gradients(gm)):
            return 0
        returned = set(gm.graph.output_node().all_input_nodes)
        forward = [node for node in gm.graph.nodes if node not in backward | returned]
        casts = [node for node in forward if _widens(node) and any(user in backward for user in readers_of(node))]
        operands, of_inputs = _operands(backward), _computed_from_inputs(gm)
        again = casts + list(filter(_is_mask, forward))
        read = _computed_from_inputs(gm, ATEN.embedding.default)  # norms read them anew, as in stock's backward
        tagged = sum(map(_tag, again)) + sum(_tag_normed(node, read) for node in forward)
        _save((operands | {base_of(node.args[0]) for node in again}) & of_inputs)
        return tagged
