"""Records of a graph's values and casts, made from its nodes, and followed from pass to pass."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ampcompile.dtypes import FLOATS, short_name
from ampcompile.passes.analysis.commuting import CAST
from ampcompile.passes.analysis.op_traits import CONVERSIONS, PRODUCTS_AFTER, has, is_view, named_operands
from ampcompile.passes.analysis.readers import computed_from_gradients
from ampcompile.passes.base import Applied, Pass
from ampcompile.passes.before.hoist_weights import find_weights
from ampcompile.passes.before.insert_casts import InsertCasts
from ampcompile.passes.graph import (
    UNDECIDED,
    Cast,
    bodies,
    cast_of,
    decision_of,
    differentiated_path,
    graphs,
    module_path,
    name_modules,
    notes_of,
    op_name,
    placeholders,
    source_line,
)
from ampcompile.passes.weight_copy import WEIGHT_COPY
from ampcompile.torch_private import autocast, compilations, pytree, tracing
from ampcompile.torch_private.cuts import Cut
from ampcompile.torch_private.dispatcher import HigherOrderOperator, OpOverload

from .graphs import BACKWARD, JOINT, CastRecord, GraphRecord, OpRecord, SavedRecord, Total, add_up
from .saved import count_peak, record_saved, shape_of

QUANTIZATIONS = ("ampcompile.quantize", "ampcompile.quantize_weight")


class Recorder:
    """Follows one graph: give `watch` to `rewrite`, and `watch_joint` to `lower`. `example_inputs` are the graph's."""

    def __init__(self, example_inputs: Sequence[Any]) -> None:
        self.example_inputs = example_inputs
        self.graph = GraphRecord(precision=_precision(example_inputs))
        self._casts: dict[int, CastRecord] = {}
        self._present: set[int] = set()  # numbers of the casts that the graph still contains

    def watch(self, done: Pass | None, gm: GraphModule) -> None:
        """Record the captured graph after a pass."""
        if done is None or UNDECIDED in gm.meta:  # no casts are inserted yet
            return
        self._add_total(done.name, gm)
        if isinstance(done, InsertCasts):
            values, self._casts = _values_and_casts(gm, set(find_weights(gm, self.example_inputs)))
            self.graph = replace(self.graph, values=values)
            self._present = set(self._casts)
            return
        if done.fate == "quantized":
            casts = _values_and_casts(gm, set(find_weights(gm, self.example_inputs)))[1]
            self._present |= casts.keys()
            self._casts |= {number: casts[number] for number in casts if number not in self._casts}
        inserted = [inserted_cast(node) for graph in graphs(gm) for node in graph.graph.nodes]
        fates = {cast.number: cast.fate for cast in inserted if cast is not None}
        for number in self._present:
            before = self._casts[number]
            removed = (*before.fate, done.fate) if done.fate else before.fate
            self._casts[number] = replace(before, fate=fates.get(number, removed))
        self._present &= fates.keys()

    def watch_joint(self, done: Pass | None, gm: GraphModule) -> None:
        """Record the graph after differentiation, or after a later pass."""
        self._add_total(f"{'differentiated' if done is None else done.name}, {JOINT}", gm)
        casts = tuple(_backward_casts(gm))
        if done is None:
            self.graph = replace(self.graph, totals=(*self.graph.totals, add_up(BACKWARD, casts)))
        products = [node for graph in graphs(gm) for node in graph.graph.nodes if has(node.target, PRODUCTS_AFTER)]
        self.graph = replace(
            self.graph,
            backward_casts=casts,
            products=(sum(notes_of(node).widened for node in products), len(products)),
            joint_code=gm.print_readable(print_output=False),
        )

    def watch_cut(self, kinds: Sequence[tuple[str, str]], paths: Mapping[str, str], cut: Cut) -> None:
        """Record what backward keeps. Of a nested region's body, which is cut before, the calling graph keeps it.

        `kinds`: see `record_saved`. `paths`: of modules, for `name_modules`.
        """
        with name_modules(paths):
            self.watch_saved(record_saved(cut, kinds))

    def watch_saved(self, saved: tuple[SavedRecord, ...]) -> None:
        """Record what backward keeps as it was read elsewhere."""
        self.graph = replace(self.graph, saved=saved)

    def watch_peak(self, budget: float, fused: bool, cut: Cut) -> None:
        """Record how much the graphs of a cut hold at once; of a nested region's body too, before its caller's."""
        self.graph = replace(
            self.graph, peaks=tuple({**dict(self.graph.peaks), budget: count_peak(cut, fused)}.items())
        )

    def finish(
        self, original: GraphModule, rewritten: GraphModule, history: Sequence[Applied], left: str = ""
    ) -> GraphRecord:
        """The record of the graph that Dynamo gave as `original`. Call it before lowering, which changes the graph.

        `left`: why the graph is left to autocast; empty if it isn't.
        """
        broken = getattr(original, "compile_subgraph_reason", None)
        self.graph = replace(
            self.graph,
            precision=f"{self.graph.precision}, left to autocast: {left}" if left else self.graph.precision,
            left=bool(left),
            reason=compilations.in_short(broken.reason, broken.user_stack) if broken and broken.graph_break else "",
            code=rewritten.print_readable(print_output=False),
            casts=tuple(self._casts.values()),
            history=tuple(history),
        )
        return self.graph

    def _add_total(self, stage: str, gm: GraphModule) -> None:
        nodes = [node for graph in graphs(gm) for node in conversions(graph)]
        total = Total(stage, len(nodes), sum(map(bytes_of, nodes)))
        self.graph = replace(self.graph, totals=(*self.graph.totals, total))


def record_op(node: Node, prefix: str = "", backward: bool = False) -> OpRecord:
    """The record of one node: its op, place, dtype, reason, and what it reads."""
    decision = decision_of(node)
    return OpRecord(
        op=op_name(node.target),
        module=module_path(node),
        source=source_line(node),
        backward=backward,
        shape=shape_of(node.meta.get("val")),
        because=decision.because,
        name=prefix + node.name,
        reads=tuple(prefix + operand.name for operand in node.all_input_nodes),
        dtype=computes_in(node),
        known=decision.known,
    )


def record_cast(node: Node, of: str, op: str = "", **fields: Any) -> CastRecord:
    """The record of a node that converts its first operand to another dtype."""
    before, after = node.args[0].meta["val"], _result_of(node)
    return CastRecord(
        op=op,
        module=module_path(node),
        source=source_line(node),
        shape=shape_of(before),
        dtype_from=before.dtype,
        dtype_to=after.dtype,
        bytes=bytes_of(node),
        of=of,
        **fields,
    )


def inserted_cast(node: Node) -> Cast | None:
    """The record that passes keep of an inserted cast, hoisted or not, and of a quantization; None for other nodes."""
    casts = node.target in (CAST, WEIGHT_COPY) or op_name(node.target) in QUANTIZATIONS
    return cast_of(node) if casts else None


def computes_in(node: Node) -> torch.dtype | None:
    """The dtype of a result if it is floating, else of the first floating operand, else of the result."""
    results = [value.dtype for value in pytree.tensors_in(node.meta.get("val"))]
    operands = [v.dtype for n in node.all_input_nodes if isinstance(v := n.meta.get("val"), torch.Tensor)]
    floats = FLOATS | {torch.float64}
    return next((d for d in (*results, *operands) if d in floats), results[0] if results else None)


def _values_and_casts(gm: GraphModule, weights: set[Node]) -> tuple[tuple[OpRecord, ...], dict[int, CastRecord]]:
    """The values of a graph and its bodies, in order, and the inserted casts by number; `weights` are inputs of `gm`.

    Of a part that is left to autocast (`torch.func` transforms), the functions that it calls are the values.
    """
    origins = {n: "weight" if n in weights else "input" for n in placeholders(gm)}  # a body's inputs are activations
    values, casts, prefixes = list[OpRecord](), dict[int, CastRecord](), {gm: ""}
    for graph in graphs(gm):
        prefix = prefixes[graph]
        for attribute, body in bodies(graph):
            prefixes.setdefault(body, f"{prefix}{attribute.name}/")
        for node in graph.graph.nodes:
            if (cast := inserted_cast(node)) is not None:
                of = _origin(node.args[0], origins)
                casts[cast.number] = record_cast(
                    node,
                    "bias" if of == "weight" and _is_bias(node) else of,
                    cast.op,
                    because=cast.because,
                    fate=cast.fate,
                    name=prefix + node.name,
                    reads=(prefix + node.args[0].name,),
                )
            elif node.op == "call_module":
                values += _functions_of_transform(node, prefix)
            elif node.op == "output" or _is_on_tensors(node):
                values.append(record_op(node, prefix))
    return tuple(values), casts


def _functions_of_transform(part: Node, prefix: str) -> Iterator[OpRecord]:
    whole = replace(record_op(part, prefix), because=part.meta["amp"].because, known=True, dtype=None)
    owner = part.graph.owning_module
    for node in owner.get_submodule(str(part.target)).graph_module.graph.nodes:
        name = op_name(node.target)
        if node.op in ("call_function", "call_method") and not name.startswith(("_", "lazy_load")):
            yield replace(whole, op=name, module=module_path(node), source=source_line(node))


def _origin(node: Any, origins: dict[Node, str]) -> str:
    while isinstance(node, Node) and node not in origins:
        if node.op == "get_attr":
            return "constant"
        if node.target is not operator.getitem and not is_view(node.target):
            break
        node = node.args[0]
    return origins.get(node, "activation")


def _is_bias(node: Node) -> bool:
    return any(isinstance(user.target, OpOverload) and ("bias", node) in named_operands(user) for user in node.users)


def _is_on_tensors(node: Node) -> bool:
    if isinstance(node.target, HigherOrderOperator):
        return True
    return isinstance(node.target, OpOverload) and bool(pytree.tensors_in(node.meta.get("val")))


def _backward_casts(gm: GraphModule) -> Iterator[CastRecord]:
    """Yield the conversions of a graph after differentiation that depend on gradients: those run in backward."""
    backward = computed_from_gradients(gm)
    for node in conversions(gm):
        if node in backward:
            made: Any = node.args[0]
            while is_view(made.target) or has(made.target, CONVERSIONS):
                made = made.args[0]
            of = op_name(made.target)
            cast = record_cast(node, "gradient" if of.startswith("tangents") else of, backward=True)
            yield replace(cast, module=differentiated_path(node))


def conversions(gm: GraphModule) -> Iterator[Node]:
    """Yield the nodes of a graph that convert a tensor from one floating dtype to another.

    Those around products that a CPU runs in float32 don't count: Inductor makes them part of the kernels beside them.
    """
    for node in gm.graph.nodes:
        if has(node.target, CONVERSIONS) and not notes_of(node).widened and isinstance(node.args[0], Node):
            values = [node.meta.get("val") for node in (node.args[0], node)]
            dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()}
            if len(dtypes) == 2:
                yield node


def bytes_of(node: Node) -> int:
    """Bytes that a conversion reads and writes, with traced sizes; 0 if the sizes depend on data."""
    return sum(
        (tracing.elements_hint(value) or 0) * value.dtype.itemsize
        for value in (node.args[0].meta["val"], _result_of(node))
    )


def _result_of(node: Node) -> Any:
    """The fake of what a conversion makes, the first of several."""
    return pytree.tree_leaves(node.meta["val"])[0]


def _precision(example_inputs: Sequence[Any]) -> str:
    devices = sorted({v.device.type for v in example_inputs if isinstance(v, torch.Tensor)}) or ["cpu"]
    return ", ".join(
        f"{device} in {short_name(torch.get_autocast_dtype(device))}"
        if autocast.is_on(device)
        else f"{device} without autocast"
        for device in devices
    )
