"""After the cut: keep values in 8 bits, where `saved` says so and all that reads them in backward keeps errors small.

A kept value becomes e4m3 numbers with one float32 scale for each 128 that are consecutive in memory, and is widened
before its first reader in backward. `TABLE` says what may read such a value; whatever else reads one keeps it as it is.
Kept as they are too: results, inputs, what is in 8 bits already, statistics of rows, small values, and those of which a
part alone is kept. A block with an infinity or a NaN arrives as NaN. What is kept as it is, and repeats numbers, as the
keys and values of grouped queries do, is kept without repeats, which backward makes again.
"""

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from ampcompile.dtypes import FLOATS
from ampcompile.passes.analysis.aliasing import memory_of
from ampcompile.passes.analysis.commuting import same_layout
from ampcompile.passes.analysis.op_traits import CONVERSIONS_AFTER, has, is_elementwise, is_view
from ampcompile.passes.analysis.readers import computed_from_gradients, original_op
from ampcompile.passes.graph import KeptForm, call_on_values, module_path, placeholders
from ampcompile.torch_private import lowering, processor, tracing
from ampcompile.torch_private.cuts import Cut

ATEN, PRIMS = torch.ops.aten, torch.ops.prims
NUMBERS, BLOCK, LARGEST, LEAST_SCALE = torch.float8_e4m3fn, 128, 448.0, 1e-30
least = 16_384
"""The fewest numbers of a value that is kept in 8 bits; tests set it."""

TABLE: Mapping[str, frozenset[int]] = {
    # Products, by the operands that may be such a value; its errors are averaged in a sum.
    **dict.fromkeys(("aten.mm", "aten.bmm", "aten._grouped_mm"), frozenset({0, 1})),
    **dict.fromkeys(("aten.addmm", "aten.baddbmm"), frozenset({1, 2})),
    "aten.convolution_backward": frozenset({1}),
    # A factor of a gradient, or of another factor.
    "aten.mul": frozenset({0, 1}),
    "aten.neg": frozenset({0}),
    "aten.pow": frozenset({0}),  # with an exponent of `POWERS`
    # A pool's backward reads only the shape of what the pool read.
    "aten.avg_pool2d_backward": frozenset({1}),
    # What a norm read: its statistics are kept in float32.
    **dict.fromkeys(("aten.native_layer_norm_backward", "aten.native_group_norm_backward"), frozenset({1})),
    **dict.fromkeys(("aten.native_batch_norm_backward", "aten._fused_rms_norm_backward"), frozenset({1})),
    # Activations whose slope changes slowly with what they read.
    **dict.fromkeys(("aten.gelu_backward", "aten.silu_backward"), frozenset({1})),
    **dict.fromkeys(("aten.gelu", "aten.silu"), frozenset({0})),
}
"""What may read a value that is kept in 8 bits, and as which of its operands. The rule is this table: other ops read
exact numbers, so exp, log, roots, reciprocals and comparisons do."""
POWERS = (1, 2, 3)
SMOOTH = frozenset({"aten.gelu", "aten.gelu_backward", "aten.silu", "aten.silu_backward"})
"""Ops of the table that Inductor takes apart: the parts may read the value, whatever they are."""
NORMS = frozenset({"aten.native_layer_norm", "aten.native_group_norm", "aten.native_batch_norm"})
"""Norms whose parts may subtract a mean, or add a bias: other differences of near numbers would be all error."""
STEPS = frozenset({"aten.sum", "aten.flip", "aten.clone", "aten.tril", "aten.triu"})
"""What a gradient may go through before a softmax's backward, or a sum's of all that comes later, subtracts of it."""
MOVES = frozenset({ATEN.clone.default, operator.getitem})
COPIES = frozenset({ATEN.clone.default, ATEN._unsafe_view.default})


def keep_in_8_bits(cut: Cut, chosen: Callable[[str], bool], weights: Collection[int] = ()) -> int:
    """Change both graphs so that forward returns 8 bits for backward. Returns the number of values.

    `chosen`: whether a module's values may be kept so. `weights`: the indices of parameters among Dynamo's inputs.
    """
    if not (
        inputs := lowering.inputs_of_dynamo(cut.forward)
    ):  # a nested region's body, from which torch takes what it returns
        return 0
    output = cut.forward.graph.output_node()
    outputs = list(output.args[0])
    results, descriptions = outputs[: cut.results], output.meta.get("desc")
    returned = {memory_of(value) for value in results if isinstance(value, Node)}
    memories = [memory_of(value) for value in outputs[cut.results :] if isinstance(value, Node)]
    of_weights = _casts_of({node for i, node in inputs.items() if i in weights})
    marks = {node.name: node for node in placeholders(cut.backward)}
    gradients, new, count = computed_from_gradients(cut.backward), list(results), 0
    told = list(descriptions[: cut.results]) if descriptions is not None else []
    for i, value in enumerate(outputs[cut.results :], cut.results):
        new.append(value)
        told += descriptions[i : i + 1] if descriptions is not None else []
        if not isinstance(value, Node) or not isinstance(value.meta.get("val"), torch.Tensor):
            continue
        memory = memory_of(value)
        why = "it is returned" if memory in returned else _why_not(value, memory, memories.count(memory))
        why = why or ("a cast of a weight" if memory[-1] in of_weights else "")
        why = why or ("" if chosen(module_path(value)) else "it isn't chosen")
        mark = marks.get(value.name)
        why = why or ("nothing reads it" if mark is None else _unfit_reader(mark, gradients))
        if why or mark is None:
            value.meta["amp_kept"] = KeptForm(value, because=why if memory[-1].op == "call_function" else "")
            alone = memories.count(memory) == 1 == len(memory) and memory not in returned
            alone = alone and not value.meta.get("saved_tensor_with_no_vc_check")
            if mark is not None and mark.users and alone and chosen(module_path(value)):
                new[-1] = _keep_unrepeated(value, mark, {*memories, *returned}, why) or value
            continue
        numbers, scales = _narrow(value)
        _widen(mark, numbers, scales)
        new[-1:] = [numbers, scales]
        told += descriptions[i : i + 1] if descriptions is not None else []
        count += 1
    output.args = (tuple(new),)
    if descriptions is not None:
        output.meta["desc"] = told
    for gm in (cut.forward, cut.backward):
        gm.graph.lint()
        gm.recompile()
    return count


def _keep_unrepeated(value: Node, mark: Node, taken: Collection[tuple[Node, ...]], why: str) -> Node | None:
    """Keep what a value repeats, in its dtype, in its place, and repeat that in backward; None if it repeats nothing.

    `taken`: memories that are kept otherwise, or returned.
    """
    fake, node, moves = value.meta["val"], value, list[Node]()
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        moves.append(node)
        source = node.all_input_nodes[0]
        if not (is_view(node.target) or has(node.target, CONVERSIONS_AFTER) or node.target in COPIES):
            return None
        if node.target is ATEN.expand.default and 2 * source.meta["val"].numel() <= fake.numel():
            break
        node = source
    else:
        return None
    dtype, casts = source.meta["val"].dtype, [move for move in moves if has(move.target, CONVERSIONS_AFTER)]
    exact = len(casts) <= (fake.itemsize < dtype.itemsize) and {m.meta["val"].dtype for m in moves} <= {
        dtype,
        fake.dtype,
    }
    if source.op != "call_function" or not exact or any(not isinstance(n, int) for n in fake.shape):
        return None
    if not _is_dense(fake) or (not casts and (memory_of(source) in taken or memory_of(source)[-1].op == "placeholder")):
        return None
    call = _Calls(source.next, source)
    kept = call.converted(source, fake.dtype) if casts else call(ATEN.alias.default, source)
    kept.meta["amp_kept"] = KeptForm(value, (kept,), because=f"{why}; before it is repeated")
    with mark.graph.inserting_before(mark):
        wide = mark.graph.placeholder(f"{mark.name}_unrepeated")
    wide.meta["val"] = kept.meta["val"]
    kept._rename(wide.name)
    call = _Calls(_first_user(mark), mark)
    call.meta["amp_kept"] = KeptForm(None, widens=True)
    for move in reversed(moves):
        if move not in casts:
            wide = call(move.target, wide, *move.args[1:], **move.kwargs)
    if not same_layout(wide.meta["val"], fake):
        wide = call(ATEN.permute.default, wide, order := _order(fake))
        wide = call(ATEN.clone.default, wide, memory_format=torch.contiguous_format)
        wide = call(ATEN.permute.default, wide, [order.index(i) for i in range(fake.dim())])
    mark.replace_all_uses_with(wide)
    mark.graph.erase_node(mark)
    return kept


def _why_not(value: Node, memory: tuple[Node, ...], times: int) -> str:
    fake, base = value.meta["val"], memory[-1].meta.get("val")
    if memory[-1].op != "call_function" or len(memory) > 1:
        return "an input, or of a nested region" if len(memory) > 1 else "alive anyway"
    if fake.dtype not in FLOATS or type(fake).__name__ not in ("FakeTensor", "Tensor"):
        return f"it is in {fake.dtype}".replace("torch.", "")
    if fake.device.type != "cpu" and (hindrance := _hindrance(fake.device)):
        return hindrance
    if any(not isinstance(size, int) for size in fake.shape):
        return "its size is dynamic"
    if fake.numel() < max(least, 1):
        return f"it has fewer than {least} numbers"
    if times > 1 or not isinstance(base, torch.Tensor) or base.numel() != fake.numel() or not _is_dense(fake):
        return "only a part of its memory is kept, or several"
    return "torch checks no version of it" if value.meta.get("saved_tensor_with_no_vc_check") else ""


def _casts_of(weights: set[Node]) -> set[Node]:
    """What is made of weights by casts and views alone."""
    casts, pending = set[Node](), [*weights]
    while pending:
        node = pending.pop()
        casts.add(node)
        pending += [u for u in node.users if is_view(u.target) or has(u.target, CONVERSIONS_AFTER)]
    return casts


def _hindrance(device: torch.device) -> str:
    """Why a device has no e4m3 numbers; empty if it has."""
    return processor.hinders_fp8(device) if device.type == "cuda" else f"{device.type} devices aren't tried"


def _order(fake: torch.Tensor) -> list[int]:
    """The dimensions in the order of memory, the slowest first."""
    return sorted(range(fake.dim()), key=lambda i: (-fake.stride()[i], i))


def _is_dense(fake: torch.Tensor) -> bool:
    return fake.permute(_order(fake)).is_contiguous()


def _unfit_reader(mark: Node, gradients: set[Node]) -> str:
    """What reads a value in backward and isn't in the table; empty if all that read it are."""
    pending, seen = [mark], {mark}
    while pending:
        node = pending.pop()
        for user in node.users:
            if user.op != "call_function":
                return "backward returns it"
            original, name = original_op(user), original_op(user, taken_apart=True)
            if is_view(user.target) or has(user.target, CONVERSIONS_AFTER) or user.target in MOVES:
                further = True
            elif original in SMOOTH and name != original:
                further = user not in gradients
            else:
                fits = name in ("aten.sub", "aten.sum", "aten.add") and original.removesuffix("_backward") in NORMS
                fits = fits or _positions(user, node) <= TABLE.get(name, frozenset()) != frozenset()
                fits = fits and (name != "aten.pow" or user.args[1] in POWERS)
                if not fits or not _is_whole(user, node):
                    return f"read by {name}"
                if user in gradients and (end := _subtracted_by(user)):
                    return f"read by {name}, and that by the backward of {end}"
                further = user not in gradients
            if further and user not in seen:
                seen.add(user)
                pending.append(user)
    return ""


def _subtracted_by(gradient: Node) -> str:
    """What reads a gradient, behind steps of its own, and subtracts near numbers of it; empty if nothing does."""
    pending, seen = [gradient], {gradient}
    while pending:
        for user in pending.pop().users:
            name = original_op(user)
            if end := next((end for end in ("softmax", "cumsum") if end in name), ""):
                return end
            steps = is_view(user.target) or is_elementwise(user.target) or has(user.target, CONVERSIONS_AFTER)
            if user not in seen and (steps or name in STEPS):
                seen.add(user)
                pending.append(user)
    return ""


def _positions(user: Node, node: Node) -> set[int]:
    return {i for i, operand in enumerate(user.args) if operand is node}


def _is_whole(user: Node, node: Node) -> bool:
    """False for a number for each row, or column, of an elementwise op's other operand."""
    if not is_elementwise(user.target):
        return True
    values = [operand.meta.get("val") for operand in user.all_input_nodes]
    return all(v.numel() <= node.meta["val"].numel() for v in values if isinstance(v, torch.Tensor))


class _Calls:
    """Calls of ops that are inserted before a node, with their fake values, and the marks of another."""

    def __init__(self, before: Node, like: Node) -> None:
        self.before = before
        self.meta = {key: like.meta[key] for key in ("nn_module_stack", "stack_trace", "custom") if key in like.meta}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        graph = self.before.graph
        with graph.inserting_before(self.before):
            node = graph.call_function(target, args, kwargs)
        node.meta = {**self.meta}
        with tracing.on_fakes_of(graph.owning_module):
            node.meta["val"] = call_on_values(node)
        return node

    def converted(self, node: Node, dtype: torch.dtype) -> Node:
        """The node's value in a dtype."""
        return node if node.meta["val"].dtype == dtype else self(PRIMS.convert_element_type.default, node, dtype)


def _narrow(value: Node) -> tuple[Node, Node]:
    """Insert the e4m3 numbers of a value, in the order of memory in rows of blocks, and their scales, in forward."""
    fake = value.meta["val"]
    call, order, rest = _Calls(value.next, value), _order(fake), -fake.numel() % BLOCK
    call.meta["amp_kept"] = KeptForm(None)
    flat = value if order == [*range(fake.dim())] else call(ATEN.permute.default, value, order)
    if rest:
        flat = call(ATEN.constant_pad_nd.default, call(ATEN.reshape.default, flat, [-1]), [0, rest])
    rows = call.converted(call(ATEN.reshape.default, flat, _blocks(flat.meta["val"].shape)), torch.float32)
    sizes = rows.meta["val"].shape
    within = [i for i in range(-len(sizes), 0) if math.prod(sizes[i:]) <= BLOCK]
    most = call(ATEN.amax.default, call(ATEN.abs.default, rows), within, True)
    scales = call(ATEN.clamp_min.default, call(ATEN.mul.Tensor, most, 1 / LARGEST), LEAST_SCALE)
    numbers = call.converted(call(ATEN.div.Tensor, rows, scales), NUMBERS)
    numbers.meta["amp_kept"] = KeptForm(value, (numbers, scales))
    return numbers, scales


def _blocks(sizes: Sequence[int]) -> list[int]:
    """Sizes of the same numbers in the same order, of which the last ones make a block.

    None is merged where that works: over merged sizes Inductor's C++ divides every index, and vectorizes nothing.
    """
    rest = BLOCK
    for i in reversed(range(len(sizes))):
        if sizes[i] % rest == 0:
            return [*sizes[:i], sizes[i] // rest, rest, *sizes[i + 1 :]]
        if rest % sizes[i]:
            break
        rest //= sizes[i]
    return [-1, BLOCK]


def _first_user(mark: Node) -> Node:
    places = {node: i for i, node in enumerate(mark.graph.nodes)}
    return min(mark.users, key=places.__getitem__)


def _widen(mark: Node, numbers: Node, scales: Node) -> None:
    """Take 8 bits and scales in backward instead of a value, and widen them before what reads it first."""
    graph, fake, inputs = mark.graph, mark.meta["val"], []
    with graph.inserting_before(mark):
        for suffix, node in (("in_8_bits", numbers), ("scales", scales)):
            made = graph.placeholder(f"{mark.name}_{suffix}")
            made.meta["val"] = node.meta["val"]
            inputs.append(made)
    numbers._rename(inputs[0].name)
    scales._rename(inputs[1].name)
    order = _order(fake)
    call = _Calls(_first_user(mark), mark)
    call.meta["amp_kept"] = KeptForm(None, widens=True)
    rows = call(ATEN.mul.Tensor, call.converted(inputs[0], torch.float32), inputs[1])
    flat = call(ATEN.reshape.default, call.converted(rows, fake.dtype), [-1])
    if fake.numel() % BLOCK:
        flat = call(ATEN.slice.Tensor, flat, 0, 0, fake.numel())
    wide = call(ATEN.reshape.default, flat, [fake.shape[i] for i in order])
    if order != [*range(fake.dim())]:
        wide = call(ATEN.permute.default, wide, [order.index(i) for i in range(fake.dim())])
    mark.replace_all_uses_with(wide)
    graph.erase_node(mark)
