"""Helpers that passes share: fake values, regions, decisions, notes and sources of nodes; copying and erasing nodes."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from ampcompile import dtypes
from ampcompile.dtypes import FLOATS
from ampcompile.torch_private import autocast
from ampcompile.torch_private.dispatcher import OpOverload, is_traceable_wrapper_subclass
from ampcompile.weights.spec import CopySpec

Precision = torch.dtype | None  # the low-precision dtype of a region; None where autocast is off
ENTER = autocast.ENTER_AUTOCAST
EXIT = autocast.EXIT_AUTOCAST
_OURS = os.path.dirname(dtypes.__file__) + os.sep
_BELOW_AUTOGRAD = frozenset({"_get_data_attr", "_lower_version_count_by_1"})
UNDECIDED = "amp_undecided"  # in `gm.meta` until casts are inserted: values still have the dtypes of the autocast trace


@dataclass(frozen=True)
class Cast:
    """The record of a cast that we inserted."""

    op: str
    because: str
    fate: tuple[str, ...] = ("inserted",)  # what passes made of it: hoisted, shared, folded, quantized
    # Identifies the cast when `fate` grows, so that a reader can tell if the cast is still in the graph.
    number: int = field(default_factory=itertools.count().__next__, compare=False)

    def after(self, fate: str) -> Cast:
        """The record of what a pass has made of the cast."""
        return replace(self, fate=(*self.fate, fate))


@dataclass(frozen=True)
class Decision:
    """The decision of `assign_precision` about one node, with its reason; `insert_casts` acts on nothing else."""

    because: str = ""
    result: Any = None  # the fake value that the node yields once the decision is carried out
    operands: Mapping[Node, torch.dtype] = field(default_factory=dict)  # inputs to cast, each to this dtype
    arguments: Mapping[str, Any] = field(default_factory=dict)  # to set, by their name in the schema
    target: Any = None  # the overload to call instead
    narrow: torch.dtype | None = None  # the dtype that the result is cast to
    regions: Regions | None = None  # under which a part of the graph that isn't rewritten runs
    known: bool = True  # False for others' ops without a rule, and for parts left to the dispatcher's autocast
    clamps: Mapping[Node, float] = field(default_factory=dict)  # constants to clamp, each to this magnitude
    bodies: Mapping[Node, GraphModule] = field(default_factory=dict)  # copies of bodies that other calls share
    fp8: str = ""  # the recipe of a product whose operands are quantized
    unquantized: str = ""  # why a product that a rule wants in fp8, on a device that can, isn't quantized


@dataclass(frozen=True)
class Notes:
    """What passes found out about a node, or made of it, decisions aside."""

    constant: float | None = None  # the largest finite magnitude of an input that is a known constant
    cast: Cast | None = None  # the record of a cast that we inserted
    copy: CopySpec | None = None  # the weight's copy that an input is
    rounded: torch.dtype | None = None  # the type that all numbers of a float32 input are rounded to already
    widened: bool = False  # True for a product that a CPU runs in float32, and for the conversions around it
    unquantized: str = ""  # why a product that reads this weight runs in 16 bits though the policy asks for fp8


@dataclass(frozen=True)
class KeptForm:
    """How a value is kept that forward returns for backward, in `meta["amp_kept"]` of what is returned."""

    value: Node | None  # None for what is a part of the one before
    parts: tuple[Node, ...] = ()  # the value's numbers in 8 bits, and their scales
    because: str = ""  # why it isn't in 8 bits
    widens: bool = False  # True for a node of backward that makes the value of its parts again


def kept_form(node: Node) -> KeptForm:
    """How forward keeps a value for backward; as it is, if nothing else was decided."""
    return node.meta.get("amp_kept") or KeptForm(node)


def decision_of(node: Node) -> Decision:
    """The decision about a node; an empty one if there is none."""
    return node.meta.get("amp", _NO_DECISION)


def notes_of(node: Node) -> Notes:
    """What passes have noted about a node; empty if they noted nothing."""
    return node.meta.get("amp_notes", _NO_NOTES)


def cast_of(node: Node) -> Cast | None:
    """The record of a cast that we inserted; None for other nodes."""
    return notes_of(node).cast


def note(node: Node, **fields: Any) -> None:
    """Change fields of a node's notes."""
    node.meta["amp_notes"] = replace(notes_of(node), **fields)


_NO_DECISION, _NO_NOTES = Decision(), Notes()


class Regions:
    """The autocast state at one point of a graph: per device type, whether it is on and its dtype."""

    def __init__(self, states: Mapping[str, tuple[bool, torch.dtype]]) -> None:
        self._states = dict(states)
        self._saved: list[tuple[str, tuple[bool, torch.dtype]]] = []

    def precision(self, device_type: str) -> Precision:
        """The low-precision dtype in force for a device type; None where autocast is off."""
        enabled, dtype = self._states.get(device_type, (False, torch.bfloat16))
        return dtype if enabled else None

    def enter(self, device_type: str, dtype: torch.dtype | None, enabled: bool) -> None:
        """Update the state at an `_enter_autocast` node."""
        before = self._states.get(device_type, (False, torch.bfloat16))
        self._saved.append((device_type, before))
        self._states[device_type] = (enabled, dtype or before[1])

    def leave(self) -> None:
        """Restore the state at the `_exit_autocast` node of the innermost region."""
        device_type, before = self._saved.pop()
        self._states[device_type] = before

    def copy(self) -> Regions:
        """A copy of the state for a body, which leaves every region that it enters."""
        return Regions(self._states)

    def off(self) -> Regions:
        """A copy with autocast off on all devices, for custom backwards, which run as written."""
        return Regions({device: (False, dtype) for device, (_, dtype) in self._states.items()})

    def key(self) -> tuple[Any, ...]:
        """A hashable summary of the state: equal keys give equal decisions."""
        return tuple(sorted((d, str(s)) for d, s in self._states.items()))


def is_castable(value: Any) -> bool:
    """True if autocast may cast a value: a dense float32, bfloat16 or float16 tensor, no quantized subclass."""
    if not is_float_tensor(value) or value.layout not in (torch.strided, torch.jagged):
        return False
    # Of the wrapper subclasses only those whose inner tensors hold the same numbers.
    return not is_traceable_wrapper_subclass(value) or type(value).__name__ in ("DTensor", "NestedTensor")


def is_float_tensor(value: Any) -> bool:
    """True if a value is a tensor of a type that autocast casts; see `is_castable`."""
    return isinstance(value, torch.Tensor) and value.dtype in FLOATS


def to_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast a tensor to a dtype; return a tensor that has the dtype already, or another value, unchanged."""
    return value.to(dtype) if dtype is not None and isinstance(value, torch.Tensor) and value.dtype != dtype else value


def device_type_of(values: list[Any]) -> str | None:
    """The device type whose autocast applies to an op: that of its tensors, an accelerator's before the CPU's."""
    device_types = [v.device.type for v in values if isinstance(v, torch.Tensor)]
    return next((d for d in device_types if d != "cpu"), device_types[0] if device_types else None)


def placeholders(gm: GraphModule) -> list[Node]:
    """The graph's inputs, in order."""
    return list(gm.graph.find_nodes(op="placeholder"))


def is_below_autograd(target: Any) -> bool:
    """True if a call is Dynamo's form of reading or assigning `tensor.data`, which shares memory unseen by autograd.

    No tracer records it either. AOTAutograd, and a graph that runs without it, treat the call as eager mode does.
    """
    return getattr(target, "__name__", "") in _BELOW_AUTOGRAD


def held_tensors(gm: GraphModule) -> dict[str, torch.Tensor]:
    """The tensors that a graph holds as attributes and that change: parameters and state of compiled optimizers."""
    return {name: getattr(gm, name) for name in getattr(gm, "_param_name_to_source", ()) if hasattr(gm, name)}


def bodies(gm: GraphModule) -> Iterator[tuple[Node, GraphModule]]:
    """Yield the graphs that higher-order ops call: (the `get_attr` node, the graph)."""
    for node in gm.graph.find_nodes(op="get_attr"):
        body = getattr(gm, str(node.target), None)
        if isinstance(body, GraphModule):
            yield node, body


def graphs(gm: GraphModule) -> Iterator[GraphModule]:
    """Yield a graph and, recursively, the bodies that its higher-order ops call: each once, callers first.

    The walk reads a graph's bodies after yielding the graph, so a pass may change the graph that it is given.
    """
    pending, seen = [gm], set[GraphModule]()  # the graphs, not their ids: a pass may drop one that was yielded
    while pending:
        graph = pending.pop()
        if graph not in seen:
            seen.add(graph)
            yield graph
            pending += reversed([body for _, body in bodies(graph)])


def copy_graph(gm: GraphModule) -> GraphModule:
    """Copy a graph, so that later changes of `gm` don't reach the copy; constants and bodies stay the same objects."""
    return GraphModule(gm, copy.deepcopy(gm.graph))


def call_on_values(node: Node) -> Any:
    """Run a call on its operands' fake values and return the fake result."""
    target: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    return target(*args, **kwargs)


def insert_call(
    graph: Graph, target: Any, operand: Node, *args: Any, like: Node | None = None, name: str | None = None
) -> Node:
    """Insert a call of an op at the graph's insertion point, with its fake value.

    The rest of its `meta` is that of `like`, if not of its operand.
    """
    node = graph.create_node("call_function", target, (operand, *args), name=name)
    node.meta = {**(like or operand).meta, "val": call_on_values(node)}
    node.meta.pop("unbacked_bindings", None)  # sizes and offsets that another node binds
    return node


def replace_node(node: Node, new: Node) -> None:
    """Let all that reads a node read another, and erase it."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def erase_unread(nodes: Sequence[Node]) -> None:
    """Erase the nodes that have no user left, the last one first. They must have no side effects."""
    for node in reversed(nodes):
        if not node.users:
            node.graph.erase_node(node)


def module_path(node: Node) -> str:
    """The path of the innermost module a node was called in, as `named_modules` spells it."""
    return _path_of(node.meta.get("nn_module_stack"))


def differentiated_path(node: Node) -> str:
    """The path of the module whose op a node of backward differentiates, as far as torch tells; else `module_path`."""
    return _path_of(node.meta.get("fwd_nn_module_stack")) or module_path(node)


def current_module_path() -> str:
    """The module path of the node that an `fx.Interpreter` is running."""
    return _path_of(torch.fx.traceback.get_current_meta().get("nn_module_stack"))


_names: ContextVar[Mapping[str, str]] = ContextVar("names", default=MappingProxyType({}))


@contextlib.contextmanager
def name_modules(names: Mapping[str, str]) -> Iterator[None]:
    """Let `module_path` use these names inside the context: the `id` of a module, as a string, to its path."""
    token = _names.set(names)
    try:
        yield
    finally:
        _names.reset(token)


def _path_of(stack: Mapping[str, tuple[str, Any]] | None) -> str:
    """The path of the innermost module in `name_modules`, and from there on as Dynamo spells it.

    Dynamo spells paths from the frame it compiles, which is in the middle of a model after a graph break.
    """
    if not stack:
        return ""
    names, spelled = _names.get(), [path for path, _ in stack.values()]
    for key, path in reversed(list(zip(stack, spelled, strict=True))):
        if (named := names.get(key.partition("@")[0])) is not None:  # `@` counts the calls of a module
            return f"{named}.{_to_dotted(spelled[-1].removeprefix(path))}".strip(".")
    return _to_dotted(re.sub(r"^[LG]\['[^']+'\]", "", spelled[-1]))


def _to_dotted(path: str) -> str:
    path = re.sub(r"\._modules\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]", lambda m: f".{m[1] or m[2] or m[3]}", path)
    return path.replace("._orig_mod", "").strip(".")


def source_line(node: Node) -> str:
    """The user's source line of a node, `file:line`, skipping frames of this package; empty if unknown."""
    trace = node.meta.get("stack_trace") or ""
    frames = [place for place in re.findall(r'File "([^"]+)", line (\d+)', trace) if not place[0].startswith(_OURS)]
    return ":".join(frames[-1]) if frames else ""


def op_name(target: Any) -> str:
    """An op as users write it: `aten.linear`, `flex_attention`, `operator.add`."""
    if isinstance(target, OpOverload):
        return str(target.overloadpacket)
    return getattr(target, "__name__", str(target))
