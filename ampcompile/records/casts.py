"""Plain records of one rewritten graph: all casts and all ops. They hold no tensor and no graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from ampcompile.dtypes import FLOATS, short_name
from ampcompile.passes.analysis.commuting import CAST
from ampcompile.passes.analysis.op_traits import is_view
from ampcompile.passes.analysis.schema import operands
from ampcompile.passes.base import Applied
from ampcompile.passes.fuse.matching import fusions
from ampcompile.passes.graph import Cast, bodies, decision_of, graphs, module_path, op_name, placeholders, source_line
from ampcompile.passes.weight_copy import WEIGHT_COPY
from ampcompile.torch_private import pytree
from ampcompile.torch_private.types import HigherOrderOperator, OpOverload

from .totals import JointCast, Total, bytes_of

if TYPE_CHECKING:
    from .graph import NodeRecord

Shape = tuple[int | str, ...]
PER_UPDATE = "once per update"


@dataclass(frozen=True)
class CastRecord:
    """One cast that ampcompile inserted."""

    op: str
    """The op it was inserted for, as `aten.linear`."""
    module: str
    """Path of the module that calls the op, as `named_modules` gives it; empty outside of modules."""
    source: str
    """The user's line, `file:line`."""
    dtype_from: torch.dtype
    dtype_to: torch.dtype
    shape: Shape
    """Shape of the cast value; symbolic sizes are strings."""
    bytes: int
    """Bytes read and written by the cast alone; symbolic sizes count as the sizes they were compiled for."""
    because: str
    fate: tuple[str, ...]
    """The changes that passes made to it, in order: inserted, hoisted, shared, folded, fused."""
    of: str
    """The kind of value cast: "weight", "input", "constant" or "activation"."""
    bias: bool = False
    """True for a weight that is the bias of its op."""

    @property
    def shown(self) -> str:
        """The kind as tables show it: "bias" instead of "weight" for a bias."""
        return "bias" if self.bias else self.of

    @property
    def dtypes(self) -> str:
        """Both dtypes, as `f32>bf16`."""
        return f"{short_name(self.dtype_from)}>{short_name(self.dtype_to)}"

    @property
    def sizes(self) -> str:
        """The shape as `8x16`."""
        return "x".join(map(str, self.shape)) or "scalar"

    @property
    def runs(self) -> bool:
        """True if it still runs as a separate cast in every call."""
        return not {"hoisted", "shared", "folded", "fused"} & set(self.fate)

    @property
    def when(self) -> str:
        """When it runs: "every call", "once per update" of a weight; or how it became part of something else."""
        if self.runs:
            return "every call"
        return next((fate for fate in self.fate if fate in ("shared", "folded", "fused")), PER_UPDATE)


@dataclass(frozen=True)
class OpRecord:
    """One op on tensors, and the dtype in which it computes."""

    op: str
    module: str
    source: str
    dtype: torch.dtype | None
    """Dtype of the result if floating, else of the first floating operand, else of the result."""
    because: str
    known: bool
    """False if the op is unknown to the policy."""


@dataclass(frozen=True)
class FusionRecord:
    """One op, or several, that a fused kernel replaced."""

    family: str
    op: str
    module: str
    source: str
    saved: int
    """Bytes of memory traffic saved in one call, forward and backward, counted against Inductor's own code."""
    freed: int
    """Reduction of the memory held at one time, in bytes."""


@dataclass(frozen=True)
class GraphRecord:
    """One graph that Dynamo found. `reason`: why a graph break ends it; empty if the function ends there."""

    precision: str
    """Precision by device type; for a graph that is left to autocast also the reason."""
    reason: str
    code: str
    numbered_casts: Mapping[int, CastRecord]
    ops: tuple[OpRecord, ...]
    nodes: tuple[NodeRecord, ...]
    """Every value, as `insert_casts` left the graph."""
    history: tuple[Applied, ...]
    totals: tuple[Total, ...]
    """Conversions in eager autocast, then in the graph after each pass, then after differentiation."""
    fusions: tuple[FusionRecord, ...] = ()
    joint_casts: tuple[JointCast, ...] = ()
    """The conversions after differentiation, those of backward among them."""
    products: tuple[int, int] = (0, 0)
    """The products after differentiation that a CPU runs in float32, and all of them."""
    joint_code: str = ""
    """Forward and backward as one graph, after the passes on it; without gradients, forward alone."""
    left: bool = False
    """True if the graph is left to autocast: it then has no records of ops and casts."""

    @property
    def backward_casts(self) -> list[JointCast]:
        """Those of `joint_casts` that run in backward."""
        return [cast for cast in self.joint_casts if cast.backward]

    @property
    def casts(self) -> list[CastRecord]:
        """The casts in order."""
        return list(self.numbered_casts.values())


def plain(record: Any) -> dict[str, Any]:
    """Return a record as plain data, with dtypes as `bf16`: for JSON."""
    return {name: short_name(v) if isinstance(v, torch.dtype) else v for name, v in asdict(record).items()}


def inserted_casts(gm: GraphModule) -> Iterator[tuple[Node, Cast]]:
    """Yield every inserted cast of one graph, hoisted ones included, with its record."""
    for node in gm.graph.nodes:
        if (cast := inserted_cast(node)) is not None:
            yield node, cast


def casts_of(gm: GraphModule, weights: set[Node]) -> Iterator[tuple[int, CastRecord]]:
    """Yield the casts of a rewritten graph and its bodies, in order, with numbers; `weights` are inputs of `gm`."""
    origins = {n: "weight" if n in weights else "input" for n in placeholders(gm)}
    for graph in graphs(gm):
        _trace_into_bodies(graph, origins)
        for node, record in inserted_casts(graph):
            before, after = node.args[0].meta["val"], node.meta["val"]
            of = _origin(node.args[0], origins)
            cast = CastRecord(
                op=record.op,
                module=module_path(node),
                source=source_line(node),
                dtype_from=before.dtype,
                dtype_to=after.dtype,
                shape=shape_of(before),
                bytes=bytes_of(before, after),
                because=record.because,
                fate=record.fate,
                of=of,
                bias=of == "weight" and any(_is_bias(node, user) for user in node.users),
            )
            yield record.number, cast


def cast_of_result(result: torch.Tensor, because: str, source: str) -> CastRecord:
    """The cast of a call's result outside of any graph; `source`: the line that defines the callable."""
    return CastRecord(
        op="output",
        module="",
        source=source,
        dtype_from=result.dtype,
        dtype_to=torch.float32,
        shape=shape_of(result),
        bytes=result.numel() * (result.itemsize + torch.float32.itemsize),
        because=because,
        fate=("inserted",),
        of="activation",
    )


def ops_of(gm: GraphModule) -> Iterator[OpRecord]:
    """Yield the ops on tensors of a rewritten graph and its bodies, in order, without inserted casts.

    Of a part that is left to autocast (`torch.func` transforms), the functions that it calls.
    """
    for graph in graphs(gm):
        for node in graph.graph.nodes:
            if node.op == "call_module":
                yield from _left_to_autocast(node)
            if inserted_cast(node) is not None or not _on_tensors(node):
                continue
            yield OpRecord(
                op=op_name(node.target),
                module=module_path(node),
                source=source_line(node),
                dtype=computes_in(node),
                because=decision_of(node).because,
                known=decision_of(node).known,
            )


def _left_to_autocast(part: Node) -> Iterator[OpRecord]:
    because = part.meta["amp"].because
    for node in part.graph.owning_module.get_submodule(str(part.target)).graph_module.graph.nodes:
        name = op_name(node.target)
        if node.op in ("call_function", "call_method") and not name.startswith(("_", "lazy_load")):
            yield OpRecord(name, module_path(node), source_line(node), None, because, known=True)


def fusions_of(gm: GraphModule) -> Iterator[FusionRecord]:
    """Yield the fused kernels of a rewritten graph and its bodies."""
    for node, fusion in fusions(gm):
        yield FusionRecord(fusion.family, fusion.op, module_path(node), source_line(node), fusion.saved, fusion.freed)


def inserted_cast(node: Node) -> Cast | None:
    """The record of a cast that ampcompile inserted, hoisted or not; None for other nodes."""
    return decision_of(node).cast if node.target in (CAST, WEIGHT_COPY) else None


def shape_of(value: torch.Tensor) -> Shape:
    """A shape as plain values."""
    return tuple(size if isinstance(size, int) else str(size) for size in value.shape)


def _trace_into_bodies(gm: GraphModule, origins: dict[Node, str]) -> None:
    """Add the origins of the inputs of bodies that a graph calls; a body with several callers keeps the first's."""
    for attribute, body in bodies(gm):
        inner = placeholders(body)
        call = next((user for user in attribute.users), None)
        # The last operands are the body's inputs; an op may have other arguments before them.
        outer = pytree.tree_leaves(call.args if call is not None else ())[-len(inner) :] if inner else []
        for value, given in zip(inner, outer, strict=False):
            if isinstance(given, Node):
                origins.setdefault(value, _origin(given, origins))


def _origin(node: Any, origins: dict[Node, str]) -> str:
    while isinstance(node, Node) and node not in origins:
        if node.op == "get_attr":
            return "constant"
        if node.target is operator.getitem or is_view(node.target):
            node = node.args[0]
        else:
            break
    return origins.get(node, "activation")


def _is_bias(node: Node, user: Node) -> bool:
    return isinstance(user.target, OpOverload) and ("bias", node) in operands(user)


def _on_tensors(node: Node) -> bool:
    if isinstance(node.target, HigherOrderOperator):
        return True
    values = pytree.tree_leaves(node.meta.get("val"))
    return isinstance(node.target, OpOverload) and any(isinstance(v, torch.Tensor) for v in values)


def computes_in(node: Node) -> torch.dtype | None:
    """The dtype of a result if it is floating, else of the first floating operand, else of the result."""
    results = [v.dtype for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    operands = [v.dtype for n in node.all_input_nodes if isinstance(v := n.meta.get("val"), torch.Tensor)]
    floats = FLOATS | {torch.float64}
    return next((d for d in (*results, *operands) if d in floats), results[0] if results else None)
