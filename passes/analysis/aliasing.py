"""Find values of a graph that share memory, memory that the graph writes, and memory that is visible outside."""

import operator

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ampcompile.passes.graph import bodies, is_below_autograd, notes_of, placeholders
from ampcompile.passes.weight_copy import WEIGHT_COPY
from ampcompile.torch_private import dispatcher, storages
from ampcompile.torch_private.dispatcher import HigherOrderOperator, OpOverload

from .op_traits import (
    CASTS,
    CONVERSIONS,
    GIVES_OWN_MEMORY,
    GIVES_OWN_MEMORY_OF_SEVERAL,
    SHARES_UNSAID,
    STATISTICS,
    UPDATES_STATISTICS,
    aliased_arguments,
    has,
    is_view,
    named_operands,
    written_arguments,
)


def written_operands(node: Node, unsaid: bool = True) -> list[Node]:
    """The operands that a call of an op writes into: those its schema names and, if `unsaid`, a norm's statistics."""
    if not isinstance(node.target, OpOverload):
        return []
    names = written_arguments(node.target)
    if unsaid and has(node.target, UPDATES_STATISTICS):
        names |= STATISTICS
    return [operand for name, operand in named_operands(node) if name in names]


def aliased_operands(node: Node, unsaid: bool = True) -> list[Node]:
    """The operands whose memory a value may share: those in the schema and, if `unsaid`, those it doesn't mention.

    Of calls that are no ops only `getitem` and `.data` are considered.
    """
    if node.target is operator.getitem or is_below_autograd(node.target):
        return [operand for operand in node.args[:1] if isinstance(operand, Node)]
    if not isinstance(node.target, OpOverload) or _converts(node):
        return []
    operands, names = list(named_operands(node)), aliased_arguments(node.target)
    any_operand = unsaid and _may_return_operand(node.target, len(operands))
    return [operand for name, operand in operands if any_operand or name in names]


def _converts(node: Node) -> bool:
    """True if a node changes its operand's dtype: a cast returns the operand itself only if the dtypes are equal."""
    if not has(node.target, CASTS) or not isinstance(node.args[0], Node):
        return False
    before, after = (n.meta.get("val") for n in (node.args[0], node))
    return isinstance(before, Tensor) and isinstance(after, Tensor) and before.dtype != after.dtype


def _may_return_operand(op: OpOverload, operands: int) -> bool:
    if has(op, GIVES_OWN_MEMORY) or (operands > 1 and has(op, GIVES_OWN_MEMORY_OF_SEVERAL)):
        return False
    return has(op, SHARES_UNSAID) or dispatcher.may_return_argument(op)


def same_memory(graph: Graph) -> list[list[Node]]:
    """Groups of inputs and constants that share memory in the call for which the graph is compiled."""
    groups: dict[int, list[Node]] = {}
    for node in graph.nodes:
        value = node.meta.get("val") if node.op in ("placeholder", "get_attr") else None
        if isinstance(value, Tensor) and value.layout == torch.strided:
            groups.setdefault(storages.storage_key(value), []).append(node)
    return [group for group in groups.values() if len(group) > 1]


INVOKE = torch.ops.higher_order.invoke_subgraph


class Aliases:
    """Alias groups of one graph's values, computed once; each node added later is its own group."""

    def __init__(self, graph: Graph) -> None:
        self._group: dict[Node, Node] = {}
        self._written: set[Node] = set()
        self._outside: set[Node] = set()
        for first, *others in same_memory(graph):
            for other in others:
                self._join(other, first)
        inner = {attribute: _writes(body) for attribute, body in bodies(graph.owning_module)}
        for node in graph.nodes:
            if node.op in ("placeholder", "output", "get_attr"):
                self._outside.update((node, *node.all_input_nodes))
            elif node.op != "call_function" or isinstance(node.target, HigherOrderOperator):
                writes = any(inner.get(operand, False) for operand in node.all_input_nodes)
                self._hand_over(node, writes or not any(operand in inner for operand in node.all_input_nodes))
            else:
                self._written.update(written_operands(node))
                for operand in aliased_operands(node):
                    self._join(node, operand)
        self._written = {self._of(node) for node in self._written}
        self._outside = {self._of(node) for node in self._outside}

    def is_written(self, node: Node) -> bool:
        """True if some op writes into a value's memory, before or after it is computed."""
        return self._of(node) in self._written

    def is_visible_outside(self, node: Node) -> bool:
        """True if a value shares memory with an input, a constant or a result of the graph."""
        return self._of(node) in self._outside

    def _hand_over(self, node: Node, writes: bool) -> None:
        """Join a call with all its operands, which it may return and, if `writes`, may also write into."""
        for operand in node.all_input_nodes:
            self._join(node, operand)
            if writes:
                self._written.add(operand)

    def _join(self, node: Node, other: Node) -> None:
        self._group[self._of(node)] = self._of(other)

    def _of(self, node: Node) -> Node:
        root = node
        while (above := self._group.get(root, root)) is not root:
            root = above
        while node is not root:
            node, self._group[node] = self._group.get(node, node), root
        return root


def inputs_written_below_autograd(gm: GraphModule) -> list[int]:
    """Indices of the inputs, without copies, that `.data` may overwrite or replace, without a version bump."""
    if not reads_data(gm):
        return []
    memory = Aliases(gm.graph)
    tensors = [(i, n) for i, n in enumerate(placeholders(gm)) if isinstance(n.meta.get("val"), Tensor)]
    return [i for i, n in tensors if notes_of(n).copy is None and memory.is_written(n)]


def overwritten_inputs(graph: Graph) -> set[Node]:
    """The inputs that a graph writes to after differentiation, where all writes are at its end."""
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return {write.args[0] for write in writes if write.args[0].op == "placeholder"}


def base_of(value: Node) -> Node:
    """The base of a view, or of a view of a view; any other value itself."""
    while _is_part(value) and isinstance(value.args[0], Node):
        value = value.args[0]
    return value


def memory_of(value: Node) -> tuple[Node, ...]:
    """The value whose memory `value` is, or is a part of; before it the calls of the nested regions that make it.

    Other ops' several results have memory of their own, unless they are views.
    """
    while value.op == "call_function" and value.args and isinstance(value.args[0], Node):
        source = value.args[0]
        if value.target is operator.getitem and source.target is INVOKE:
            body = getattr(source.graph.owning_module, str(source.args[0].target))
            *calls, made = memory_of(body.graph.output_node().args[0][value.args[1]])
            if calls or made.op != "placeholder":
                return source, *calls, made
            value = source.args[2 + placeholders(body).index(made)]
            continue
        shares = source if value.target is operator.getitem else value
        if not (is_view(shares.target) or has(shares.target, SHARES_UNSAID)):
            break
        value = source
    return (value,)


def is_row(value: Node, length: object) -> bool:
    """True for a vector of that length that is contiguous, as is every value that it is a cast or a part of.

    Up to an input: Inductor may drop a cast, and choose another layout for what it computes, so computed values return
    False. Lengths are compared as text, which adds no guard.
    """
    if str(value.meta["val"].numel()) != str(length):
        return False
    while (fake := value.meta.get("val")) is not None:
        if isinstance(fake, Tensor) and (fake.dim() != 1 or str(fake.stride(0)) != "1"):
            return False
        if value.op == "placeholder":
            return True
        if value.target is WEIGHT_COPY:
            value = value.args[1]
        elif _is_part(value) or has(value.target, CONVERSIONS):
            value = value.args[0]
        else:
            return False
    return False


def _is_part(value: Node) -> bool:
    return value.target is operator.getitem or is_view(value.target) or has(value.target, SHARES_UNSAID)


def returned_values(graph: Graph) -> set[Node]:
    """The values that a graph returns, and the bases of those that are views."""
    returned: set[Node] = set()
    for value in graph.output_node().all_input_nodes:
        returned.update((value, base_of(value)))
    return returned


def reads_data(gm: GraphModule) -> bool:
    """True if a graph, or a body it calls, contains Dynamo's form of reading or assigning a tensor's `.data`."""
    return any(is_below_autograd(node.target) for node in gm.graph.nodes) or any(reads_data(b) for _, b in bodies(gm))


def _writes(body: GraphModule) -> bool:
    """True if an op in a body, or in the bodies it calls, writes into memory, or may."""
    return any(node.op == "call_module" or written_operands(node) for node in body.graph.nodes) or any(
        _writes(inner) for _, inner in bodies(body)
    )
