"""The values that a frame returns, as Dynamo sees them before it compiles the frame's graph. All private."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import LazyVariableTracker, TensorVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch.fx import Node

from .compiled_functions import parts_of
from .patches import Wrap
from .types import is_traceable_wrapper_subclass

Frame = Any
"""Dynamo's translator of one frame."""
CALLS_OF_MODULES = (torch.nn.Module._wrapped_call_impl, torch.nn.Module._call_impl)
"""The functions that run between the call of a module and its `forward`."""
RESUMED = "torch_dynamo_resume_in_"
"""The prefix of the names of functions that Dynamo makes of the code after a graph break."""
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def watch_returns(act: Callable[[Frame], None]) -> Wrap:
    """A wrap of `OutputGraph.compile_subgraph` that calls `act(frame)` at the end of a frame that returns a value."""

    def wrap(original: Any) -> Any:
        def compile_subgraph(self: Any, tx: Any, reason: Any, *args: Any, **kwargs: Any) -> Any:
            if reason.reason == "return_value" and tx.current_instruction.opname == "RETURN_VALUE":
                act(tx)
            return original(self, tx, reason, *args, **kwargs)

        return compile_subgraph

    return wrap


def computed_and_returned(frame: Frame, dtype: torch.dtype) -> tuple[list[Any], bool]:
    """Return the tensors of a dtype that a frame computes, returns and keeps nowhere else; True if there are no others.

    Tensors that share memory are left out, since replaced one by one they would no longer share it. Tensors from before
    the frame are left out too; after a graph break they count as others, as the frames before may have computed them.
    """
    _forget_locals(frame)
    returned = list(_contents(frame, frame.stack[-1]))
    inputs = {_memory(node) for node in frame.output.graph.find_nodes(op="placeholder")}
    low = [v for v in returned if isinstance(v, TensorVariable) and v.dtype == dtype]
    earlier = {id(v) for v in low if v.source is not None or _memory(v.proxy.node) in inputs}
    elsewhere = _kept_elsewhere(frame, {id(v) for v in returned}) if low else set()
    holders = Counter(_memory(node) for node in {v.proxy.node for v in low})
    computed = [v for v in low if id(v) not in earlier and _is_plain(v) and v.proxy.node not in elsewhere]
    computed = [v for v in computed if holders[_memory(v.proxy.node)] == 1]
    # A container from before the frame that Dynamo looked into may have been changed. Sets aren't looked into here.
    unknown = [v for v in returned if _is_seen(v) and v.source is not None and holds_values(_type(v))]
    unknown += [v for v in returned if _is_seen(v) and issubclass(_type(v), set | frozenset)]
    if frame.f_code.co_name.startswith(RESUMED):
        unknown += [v for v in returned if id(v) in earlier or not _is_seen(v)]
    return computed, not unknown and len(computed) + len(earlier) == len(low)


def replace(frame: Frame, tensors: list[Any], function: Callable[[torch.Tensor], torch.Tensor], note: Any) -> None:
    """Make the frame return `function` of some tensors instead of these; the new nodes carry a note."""
    made: dict[Node, Any] = {}
    for tensor in tensors:
        node = tensor.proxy.node
        if node not in made:
            made[node] = wrap_fx_proxy(frame, frame.output.create_proxy("call_function", function, (tensor.proxy,), {}))
            made[node].proxy.node.meta["amp_note"] = note
        tensor.proxy = made[node].proxy
        tensor.synchronize_attributes(frame)


def guard_on(frame: Frame, module: str, *path: str) -> None:
    """Guard the code compiled from the frame on the current value of a constant in a module."""
    source: Any = frame.import_source(module)
    for name in path:
        source = AttrSource(source, name)
    install_guard(source.make_guard(GuardBuilder.CONSTANT_MATCH))


def _forget_locals(frame: Frame) -> None:
    """Make Dynamo drop the objects that only local variables hold, which end with the frame."""
    symbolic_locals = frame.symbolic_locals
    frame.symbolic_locals = {name: v for name, v in symbolic_locals.items() if name in frame.cell_and_freevars()}
    try:
        frame.output.side_effects.prune_dead_object_new(frame)
    finally:
        frame.symbolic_locals = symbolic_locals


def _contents(frame: Frame, value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield a returned value and its contents, if it is a tuple, list, mapping or dataclass made in the frame."""
    seen = set() if seen is None else seen
    value = value.unwrap()
    if id(value) in seen:
        return
    seen.add(id(value))
    yield value
    if (
        value.source is None
        and _is_seen(value)
        and not isinstance(value, TensorVariable)
        and holds_values(_type(value))
    ):
        for part in _parts(frame, value):
            yield from _contents(frame, part, seen)


def _is_plain(value: Any) -> bool:
    return type(value) is TensorVariable and _memory(value.proxy.node) is not None


def _is_seen(value: Any) -> bool:
    return not isinstance(value, LazyVariableTracker) or value.is_realized()


def holds_values(kind: type) -> bool:
    """Return True if tensors in an object of this type are returned with it."""
    return issubclass(kind, tuple | list | deque | set | frozenset | Mapping) or dataclasses.is_dataclass(kind)


def _type(value: Any) -> type:
    try:
        return value.python_type()
    except NotImplementedError:
        return object


def _parts(frame: Frame, value: Any) -> Iterator[Any]:
    pending = [part for name, part in vars(value).items() if name not in value._nonvar_fields]
    pending.append(frame.output.side_effects.store_attr_mutations.get(value, {}))
    while pending:
        part = pending.pop()
        if isinstance(part, VariableTracker):
            yield part
        elif isinstance(part, list | tuple):
            pending += part
        elif isinstance(part, dict):
            pending += part.values()


def _kept_elsewhere(frame: Frame, returned: set[int]) -> set[Node]:
    """Nodes of the tensors that something else than the returned value holds at the frame's end, or that have hooks."""
    effects = frame.output.side_effects
    pending = [v for v in (*effects.id_to_variable.values(), *effects.store_attr_mutations) if id(v) not in returned]
    pending += [hook[0] for hook in effects.tensor_hooks.values()]
    nodes: set[Node] = set()
    walked: dict[int, Any] = {}

    def walk(value: Any) -> None:
        if type(value) is TensorVariable:
            nodes.add(value.proxy.node)
        pending.extend(effects.store_attr_mutations.get(value, {}).values())

    while pending:
        VariableTracker.visit(walk, pending.pop(), walked)
    return nodes


def _memory(node: Node) -> Any:
    return memory_of(node.meta.get("example_value"))


def memory_of(value: Any) -> Any:
    """Return a key that is equal for tensors that share memory, fake ones too; None where that is unknown.

    A tensor subclass, or a tensor that a transform of torch.func has wrapped, has the key of the tensors inside.
    """
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    if type(value) not in _PLAIN and is_traceable_wrapper_subclass(value):
        parts = [memory_of(part) for part in parts_of(value) if isinstance(part, torch.Tensor)]
        return parts[0] if len(parts) == 1 else tuple(parts)
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:
        return memory_of(get_unwrapped(value)) if is_functorch_wrapped_tensor(value) else None
