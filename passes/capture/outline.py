"""Outline parts of a Dynamo graph that can't be rewritten: they run under the dispatcher's own autocast.

Two kinds: `torch.func` transforms (their nesting levels become constants when retraced) and higher-order ops that
`passes.analysis.higher_order` doesn't know. They are left as Dynamo wrote them and listed by `explain`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

from ampcompile.passes.analysis import higher_order
from ampcompile.passes.graph import Regions, graphs, module_path
from ampcompile.torch_private import pytree
from ampcompile.torch_private.dispatcher import HigherOrderOperator

OUTLINED = "amp_left_alone_"
_OPERATORS = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"}  # Python's names that differ
_READS = {"getitem", "getattr", "size", "dim", "lazy_load_decompositions"}
_LEVELS = ("_vmap", "_grad", "_jvp", "_func")


class OutlinedPart(torch.nn.Module):
    """A torch-level graph that runs under `torch.autocast` with the state of its region."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__()
        self.graph_module = graph
        self.regions: Regions | None = None  # None: the autocast state of the caller, as during capture
        self.grad = True  # grad mode during capture
        self.differentiated: list[bool] = []  # for each argument, if it required gradients during capture

    def note(self, args: tuple[Any, ...]) -> None:
        """Record grad mode, and which arguments require gradients, during capture."""
        self.grad = torch.is_grad_enabled()
        self.differentiated = [isinstance(a, torch.Tensor) and a.requires_grad for a in args]

    def calls(self) -> list[tuple[str, str]]:
        """The names of the functions and methods that it calls to compute, each with the path of its module."""
        nodes = [node for graph in graphs(self.graph_module) for node in graph.graph.nodes]
        named = [(_OPERATORS.get(_name(n) or str(n.target), _name(n) or str(n.target)), module_path(n)) for n in nodes]
        called = zip(nodes, named, strict=True)
        return [
            name
            for node, name in called
            if node.op in ("call_function", "call_method") and not name[0].startswith("_") and name[0] not in _READS
        ]

    def forward(self, *args: Any) -> Any:
        return self.graph_module(*args) if self.regions is None else self.run(self.regions, *args)

    def run(self, regions: Regions, *args: Any) -> Any:
        """Call the graph in its grad mode, under the autocast state of `regions` for the device of its first tensor."""
        device_type = next((a.device.type for a in pytree.tree_leaves(args) if isinstance(a, torch.Tensor)), "cpu")
        precision = regions.precision(device_type)
        region = torch.autocast(device_type, precision, enabled=precision is not None, cache_enabled=False)
        with region, torch.set_grad_enabled(self.grad):
            return self.graph_module(*args)

    def run_on_fakes(self, regions: Regions, args: tuple[Any, ...]) -> Any:
        """`run` on fakes computed without gradients; those of differentiated arguments get `requires_grad` again."""
        with torch.set_grad_enabled(self.grad):
            # A clone, since a leaf can't be written in place.
            pairs = zip(args, self.differentiated, strict=True)
            return self.run(regions, *(a.detach().requires_grad_().clone() if grad else a for a, grad in pairs))


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", "")


def _changes_level(node: Node, how: str) -> bool:
    return _name(node).endswith(f"_{how}_nesting") and _name(node).startswith(_LEVELS)


def _unknown_hop(gm: GraphModule) -> Callable[[Node], bool]:
    def resolve(value: Any) -> Any:
        if isinstance(value, Node) and value.op == "get_attr":
            return getattr(gm, str(value.target), value)
        return value

    def unknown(node: Node) -> bool:
        if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator):
            return False
        args, kwargs = pytree.tree_map(resolve, (node.args, node.kwargs), is_leaf=lambda x: isinstance(x, Node))
        return not higher_order.is_known(node.target, args, kwargs)

    return unknown


def outline(gm: GraphModule) -> GraphModule:
    """Move every part that can't be rewritten into an `OutlinedPart` submodule; return `gm` itself if there is none."""
    unknown = _unknown_hop(gm)
    if not any(_changes_level(n, "increment") or unknown(n) for n in gm.graph.nodes):
        return gm
    part: dict[Node, int] = {}
    left_alone: set[int] = set()
    depth = current = 0
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        opens = _changes_level(node, "increment")
        if depth == 0 and (opens or unknown(node)):
            current += 1
            left_alone.add(current)
        depth += opens
        part[node] = current
        if _name(node) == "_autograd_grad":  # its operands may come from a closed part, which it then joins
            outputs_and_inputs = pytree.arg_tree_leaves(*node.args[:2])
            begins = min((part[n] for n in outputs_and_inputs if n in part), default=current)
            part.update((n, begins) for n, p in part.items() if p > begins)
            left_alone.add(current := begins)
        depth -= _changes_level(node, "decrement")
        if depth == 0 and current in left_alone:
            current += 1
    split = split_module(gm, None, part.__getitem__, keep_original_order=True, keep_original_node_name=True)
    for index in sorted(set(part.values())):
        name = f"submod_{index}"
        if index in left_alone and hasattr(split, name):
            setattr(split, name, OutlinedPart(getattr(split, name)))
    split.meta.update(gm.meta)
    return split
