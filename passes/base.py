"""The protocol of a pass, and the runner that lints, verifies, times, logs and recompiles, and reports errors."""

import logging
import operator
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node, map_arg

from ampcompile.errors import AmpError, PassError, is_of_user
from ampcompile.torch_private import pytree, tracing
from ampcompile.torch_private.dispatcher import OpOverload

from .analysis.op_traits import KNOWN_NAMESPACES, writes
from .graph import UNDECIDED, graphs, op_name, source_line

log = logging.getLogger("ampcompile")
VERIFY = os.environ.get("AMPCOMPILE_VERIFY") == "1"  # between every two passes; the tests switch it on


class Pass(Protocol):
    """A frozen dataclass with options as fields, run before or after differentiation by `run_passes`.

    `exact`: the pass changes no digit of any result. `fate`: the word with which `explain` reports a cast of ours
    that the pass removed; empty if it removes none.
    """

    @property
    def name(self) -> str: ...

    @property
    def exact(self) -> bool:
        return True

    @property
    def fate(self) -> str:
        return ""

    def apply(self, gm: GraphModule) -> int:
        """Rewrite the graph, and the bodies that it calls, in place; return the number of rewrites."""


class EachGraph(Pass):
    """Base of passes that treat a graph and the bodies that it calls alike: each pass defines `rewrite`.

    What `rewrite` computes is fake values, without gradients or autocast.
    """

    def apply(self, gm: GraphModule) -> int:
        with tracing.on_fakes_of(gm), torch.no_grad():
            return sum(map(self.rewrite, graphs(gm)))

    def rewrite(self, gm: GraphModule) -> int:
        """Rewrite one graph in place; return the number of rewrites."""
        raise NotImplementedError


@dataclass(frozen=True)
class Applied:
    """One entry of a graph's history: the pass that ran, its number of rewrites, its time in seconds."""

    name: str
    rewrites: int
    seconds: float


Watch = Callable[[Pass | None, GraphModule], None]
"""Called with the graph after each pass; None stands for AOTAutograd, which wrote the graph before the first pass."""


def run_passes(passes: Sequence[Pass], gm: GraphModule, watch: Watch | None = None) -> list[Applied]:
    """Run the passes in order. Raises PassError, naming the pass and those before it, if one fails.

    After each pass the runner checks and recompiles the graph and its bodies, and calls `watch(pass, gm)`.
    """
    history: list[Applied] = []
    computed_dtypes: dict[Any, Any] = {}  # what `verify` found after earlier passes
    for current in passes:
        start = time.perf_counter()
        try:
            rewrites = current.apply(gm)
            for graph in graphs(gm):
                graph.graph.lint()
                graph.recompile()
            if VERIFY:
                verify(gm, computed_dtypes)
        except AmpError:
            raise
        except Exception as error:
            raise PassError(_describe(current, error, history)) from error
        history.append(Applied(current.name, rewrites, time.perf_counter() - start))
        if watch is not None:
            watch(current, gm)
        log.debug("%s: %d rewrites, %.1f ms", current.name, rewrites, 1e3 * history[-1].seconds)
    return history


def _describe(failed: Pass, error: Exception, history: Sequence[Applied]) -> str:
    """The message about a failed pass: at which op and line of the user's, and whose fault it is."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    values = (value for frame in reversed(frames) for value in frame.f_locals.values())
    node = next((value for value in values if isinstance(value, Node) and value.op.startswith("call")), None)
    before = ", ".join(f"{done.name} ({done.rewrites})" for done in history) or "none"
    if node is None:
        at = raised = ""
    else:
        at = f" at {op_name(node.target)}" + (f" ({line})" if (line := source_line(node)) else "")
        custom = isinstance(node.target, OpOverload) and node.target.namespace not in KNOWN_NAMESPACES
        theirs = (frame for frame in frames if custom and is_of_user(frame))
        raised = next((f"{f.f_code.co_name} at {f.f_code.co_filename}:{f.f_lineno}" for f in theirs), "")
    message = f"pass {failed.name} failed{at}: {type(error).__name__}: {error}"
    if raised:
        return (
            f"{message}, raised in {raised}, which computes the op's result for compilers and isn't ampcompile's; "
            "expected one that takes the dtypes that the op's rule gives its operands. Let it take them, or give the "
            "op another rule, by ampcompile.register_op or a policy."
        )
    return (
        f"{message}. Passes before it: {before}. This is a fault of ampcompile or of torch {torch.__version__}; "
        "torch.compile(..., backend='inductor') under torch.autocast runs the same model meanwhile."
    )


def verify(gm: GraphModule, known: dict[Any, Any] | None = None) -> None:
    """Raise AssertionError at the first op whose fake value has another dtype than running the op again gives.

    Skips graphs before `InsertCasts`: their values come from the autocast trace, and the ops alone give other dtypes.
    `known`: result dtypes by op and operands, and by node what was verified. It is kept from pass to pass, so that each
    op runs once, and only nodes that a pass changed are looked at again.
    """
    if UNDECIDED in gm.meta:
        return
    known = {} if known is None else known
    with tracing.on_fakes_of(gm), torch.no_grad():
        for graph in graphs(gm):
            for node in graph.graph.nodes:
                _verify(node, known)


def _verify(node: Node, known: dict[Any, Any]) -> None:
    claimed = node.meta.get("val")
    on_tensors = isinstance(node.target, OpOverload) and isinstance(claimed, torch.Tensor)
    if not on_tensors or writes(node.target):
        return
    # By identity: a change gives a node other arguments, and a value another fake.
    seen = node.target, node.args, node.kwargs, claimed, *(operand.meta["val"] for operand in node.all_input_nodes)
    if (before := known.get(node)) and len(before) == len(seen) and all(map(operator.is_, before, seen)):
        return
    arguments = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    key = node.target, str(pytree.tree_map_only(torch.Tensor, _kind, arguments))
    if key not in known:
        args, kwargs = arguments
        known[key] = node.target(*args, **kwargs).dtype
    assert known[key] == claimed.dtype, (
        f"{node.format_node()} claims {claimed.dtype}, gives {known[key]} ({source_line(node)})"
    )
    known[node] = seen


def _kind(value: torch.Tensor) -> tuple[Any, ...]:
    """The properties of an operand that the dtype of a result may depend on."""
    strides = value.stride() if value.layout is torch.strided else ()
    return type(value).__name__, value.dtype, value.device, value.layout, tuple(value.shape), strides
