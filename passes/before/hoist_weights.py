"""Take the casts of weights out of the graph: each becomes a read of a copy kept between calls.

A cast `to(weight, bf16)`, inserted or the program's own, becomes `ampcompile::weight_copy(weight, copy)`, with `copy` a
new graph input that `ampcompile.weights` keeps up to date. Every use keeps a `weight_copy` of its own, which casts the
use's gradient to the weight's dtype; the gradients are summed in that dtype. After differentiation `bind_weights`
replaces each `weight_copy` by the copy. A cast of a view of a weight becomes the same view of the copy.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ampcompile.dtypes import LOW, short_name
from ampcompile.kernels.packed_conv import PACKED_CONV
from ampcompile.kernels.packed_linear import PACKED_LINEAR
from ampcompile.passes.analysis.aliasing import aliased_operands, same_memory, written_operands
from ampcompile.passes.analysis.commuting import CAST, look_through, rebuild
from ampcompile.passes.analysis.op_traits import REARRANGES, has, reads_bits
from ampcompile.passes.analysis.products import NO_PRODUCTS, WideProducts, is_dense_product
from ampcompile.passes.base import Pass
from ampcompile.passes.graph import Cast, cast_of, erase_unread, insert_call, note, notes_of, placeholders
from ampcompile.passes.weight_copy import WEIGHT_COPY
from ampcompile.sharding.weight import ShardedWeight
from ampcompile.torch_private import dynamo, storages, tracing
from ampcompile.torch_private.dispatcher import OpOverload
from ampcompile.weights.spec import CopySpec, Form, hoistable

# Higher-order ops whose bodies may read weights as operands, and the index of their first operand.
_OPERANDS_FROM: dict[Any, int] = {
    torch.ops.higher_order.tag_activation_checkpoint: 1,
    torch.ops.higher_order.invoke_subgraph: 2,
}
# Ops with a weight among their arguments, at these indices, that read only its copy, by name: few graphs need all.
_READS_COPY = {**{str(op): [1] for op in (PACKED_LINEAR, PACKED_CONV)}, str(WEIGHT_COPY): [0]}
_READS_COPY["ampcompile.fp8_linear.default"] = [3]
_QUANTIZE_WEIGHT = "ampcompile.quantize_weight.default"


def find_weights(gm: GraphModule, example_inputs: Sequence[Any]) -> dict[Node, Any]:
    """Return the inputs that are parameters, or that Dynamo marked as static: buffers, tensors held by attributes."""
    return {
        node: value
        for node, value in zip(placeholders(gm), example_inputs, strict=True)
        if isinstance(value, torch.nn.Parameter) or dynamo.is_static(node)
    }


def find_copied_weights(gm: GraphModule, example_inputs: Sequence[Any]) -> tuple[dict[Node, bool], dict[Node, bool]]:
    """Return two dicts: weights whose copies can live across calls, True for those on trial, see `CopySpec`; and those
    that FSDP gathers under a shard policy, True for those that may be gathered in fp8.

    A tensor whose sizes are symbols changes its layout from call to call, so it is cast in the graph. On a GPU so is a
    tensor that is neither parameter nor registered buffer: the host would have to wait to learn if it was refilled.
    """
    copied, gathered, managed = dict[Node, bool](), dict[Node, bool](), storages.gathered_by_fsdp()
    for node, value in find_weights(gm, example_inputs).items():
        trial = not isinstance(value, torch.nn.Parameter) and not dynamo.is_registered(node)
        if (trial and value.is_cuda) or not tracing.is_of_fixed_layout(node.meta["val"]):
            continue
        if type(value) is ShardedWeight:
            gathered[node] = value.gathering.fp8
        elif hoistable(value, managed):
            copied[node] = trial
    return copied, gathered


def _rearranges(node: Node) -> bool:
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and _rearranges(node.args[0])
    return has(node.target, REARRANGES) and not reads_bits(node.target)


def _uses(value: Node) -> Iterator[str]:
    """Yield the uses of a value, and of all values that share its memory: "read", "written" or "returned"."""
    seen, pending = {value}, [value]
    while pending:
        current = pending.pop()
        for user in current.users:
            yield _use(user, current)
            if current in aliased_operands(user) and user not in seen:
                seen.add(user)
                pending.append(user)


def _use(user: Node, value: Node) -> str:
    if user.op == "output":
        return "returned"
    if isinstance(user.target, OpOverload):
        return "written" if value in written_operands(user) else "read"
    if user.target in _OPERANDS_FROM:
        indices = [i - _OPERANDS_FROM[user.target] for i, argument in enumerate(user.args) if argument is value]
        inner = placeholders(_body(user))
        return "written" if any(use != "read" for i in indices for use in _uses(inner[i])) else "read"
    # `getitem` and `.data` only make an alias, and `_uses` goes on to its uses. Anything else that is no op, as other
    # higher-order ops and parts left to autocast, may write.
    return "read" if value in aliased_operands(user) else "written"


def _body(call: Node) -> GraphModule:
    return getattr(call.graph.owning_module, call.args[0].target)


def _may_be_hoisted(cast: Node) -> bool:
    """True if a cast is one of ours, or one of the program's own that only narrows a wider type to a 16-bit one."""
    if cast_of(cast) is not None:
        return True
    before, after = cast.args[0].meta["val"].dtype, cast.meta["val"].dtype
    return len(cast.args) == 2 and not cast.kwargs and after in LOW and before.itemsize > after.itemsize


CopyOf = Callable[[Node, Form], Node]


def _hoist(gm: GraphModule, weights: set[Node], gathered: Set[Node], wide: WideProducts, copy_of: CopyOf) -> int:
    """Replace the casts of `weights`, inputs of `gm`; `copy_of` returns the input that holds a weight's copy.

    Those that are `gathered` and quantized are read in three parts, so that backward's takes no memory in forward.
    """
    hoisted = 0
    together = {node: group for group in same_memory(gm.graph) for node in group}
    weights = {w for w in weights if not any("written" in _uses(alias) for alias in together.get(w, [w]))}
    for cast in list(gm.graph.find_nodes(op="call_function", target=CAST)):
        weight, views = look_through(cast.args[0], _rearranges)
        if weight in weights and _may_be_hoisted(cast) and all(use == "read" for use in _uses(cast)):
            _replace(cast, weight, views, copy_of(weight, Form(cast.args[1], _is_read_wide(cast, wide))))
            hoisted += 1
    for node in [node for node in gm.graph.nodes if str(node.target) == _QUANTIZE_WEIGHT and node.args[0] in weights]:
        weight, form = node.args[0], Form(torch.float8_e4m3fn, by_rows=node.args[1])
        if weight in gathered:
            for product in list(node.users):
                *before, _, turned, recipe = product.args
                plain, other, tail = (copy_of(weight, form._replace(part=i, turned=turned)) for i in range(3))
                product.args = (*before, plain, turned, recipe, other, tail)
        else:
            node.replace_all_uses_with(copy_of(weight, form))
        gm.graph.erase_node(node)
        hoisted += 1
    calls: dict[GraphModule, list[Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in _OPERANDS_FROM:
            calls.setdefault(_body(node), []).append(node)
    inner = (_hoist_in_body(body, sites, weights, gathered, wide, copy_of) for body, sites in calls.items())
    return hoisted + sum(inner)


def _is_read_wide(cast: Node, wide: WideProducts) -> bool:
    """True if a cast weight is read by products that run in float32, small ones aside."""
    dtype = cast.args[1]
    if dtype in wide.all:
        return True
    return dtype in wide.dense and any(map(is_dense_product, _readers(cast)))


def _readers(value: Node) -> Iterator[Node]:
    """Yield what reads a value, or a view of it."""
    for user in value.users:
        if _rearranges(user):
            yield from _readers(user)
        else:
            yield user


def _hoist_in_body(
    body: GraphModule, sites: list[Node], weights: set[Node], gathered: Set[Node], wide: WideProducts, copy_of: CopyOf
) -> int:
    """Hoist in a body: its input is a weight if every call passes one there; every call then passes the copy too."""
    first = _OPERANDS_FROM[sites[0].target]
    inner = placeholders(body)
    given = {p: [site.args[first + i] for site in sites] for i, p in enumerate(inner) if first + i < len(sites[0].args)}
    copies: dict[tuple[Node, Form], Node] = {}

    def inner_copy(weight: Node, form: Form) -> Node:
        if (weight, form) not in copies:
            outer_copies = [copy_of(outer, form) for outer in given[weight]]
            held = form._replace(wide=outer_copies[0].meta["val"].dtype != form.dtype)
            copies[weight, form] = add_copy(body, weight.name, weight.meta["val"], held)
            for site, outer in zip(sites, outer_copies, strict=True):
                site.args = (*site.args, outer)
        return copies[weight, form]

    theirs = {p for p, outer in given.items() if (weights & gathered).issuperset(outer)}
    kept = {p for p, outer in given.items() if (weights - gathered).issuperset(outer)}
    return _hoist(body, kept | theirs, theirs, wide, inner_copy)


def other_reads(weight: Node) -> Iterator[Node]:
    """Yield the nodes that read a weight itself, not a copy of it, also in bodies; it is an input of a graph."""
    for user in weight.users:
        if user.target in _OPERANDS_FROM:
            inner, first = placeholders(_body(user)), _OPERANDS_FROM[user.target]
            for i, argument in enumerate(user.args):
                if argument is weight:
                    yield from other_reads(inner[i - first])
        elif [i for i, argument in enumerate(user.args) if argument is weight] != _READS_COPY.get(str(user.target)):
            yield user


@dataclass(frozen=True)
class HoistWeights(Pass):
    """`copied`: the weights whose copies can live across calls, each with its `CopySpec.trial`.

    `wide`: the products that run in float32; a kept copy that one of them reads, but for small ones, holds its rounded
    numbers as float32, so that no call has to widen it. `gathered`: the weights that FSDP gathers for each call, and
    their low-precision numbers with them. The copies become the last inputs, each with its `CopySpec` as its decision's
    `copy`.
    """

    copied: Mapping[Node, bool]
    wide: WideProducts = NO_PRODUCTS
    gathered: frozenset[Node] = frozenset()
    name = "hoist_weights"
    fate = "hoisted"

    def apply(self, gm: GraphModule) -> int:
        inputs = {node: index for index, node in enumerate(placeholders(gm))}
        copies: dict[CopySpec, Node] = {}

        def copy_of(weight: Node, form: Form) -> Node:
            gathered = weight in self.gathered
            wide = form.wide and weight.meta["val"].device.type == "cpu" and not gathered
            form = form._replace(wide=wide)
            trial, unquantized = self.copied.get(weight, False), notes_of(weight).unquantized if gathered else ""
            spec = CopySpec(inputs[weight], form, trial=trial, gathered=gathered, unquantized=unquantized)
            if spec not in copies:
                copies[spec] = add_copy(gm, weight.name, weight.meta["val"], spec.form)
                note(copies[spec], copy=spec)
            return copies[spec]

        with tracing.on_fakes_of(gm):
            return _hoist(gm, {*self.copied, *self.gathered}, self.gathered, self.wide, copy_of)


def add_copy(gm: GraphModule, name: str, weight: torch.Tensor, form: Form) -> Node:
    """Add the last input of a graph: a copy of an input `weight` of this name."""
    with gm.graph.inserting_after(placeholders(gm)[-1]):
        part = "" if form.part is None else f"_{form.part}"
        copy = gm.graph.placeholder(f"{name}_{short_name(form.dtype)}{part}")
    copy.meta["val"] = form.empty_like(weight)
    # Dynamo's mark of inputs whose address Inductor may rely on.
    copy.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    copy._dynamo_source = None
    return copy


def _replace(cast: Node, weight: Node, views: list[Node], copy: Node) -> None:
    graph, record = cast.graph, cast_of(cast) or Cast("to", "the program casts this weight itself")
    with graph.inserting_before(cast):
        new = graph.call_function(WEIGHT_COPY, (weight, copy, cast.args[1]))
        new.meta = {**cast.meta, "val": copy.meta["val"].to(cast.args[1])}
        note(new, cast=record.after("hoisted"))
        read, expected = rebuild(views, new), cast.meta["val"]
        if expected.dim() == 1 and read.meta["val"].stride() != expected.stride():
            # ATen adds a bias whose numbers lie apart in a step of its own, with one rounding more.
            read = insert_call(graph, torch.ops.aten.contiguous.default, read, like=cast)
        cast.replace_all_uses_with(read)
    erase_unread([*views, cast])
