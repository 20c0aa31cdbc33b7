"""Dynamo's treatment of modules, which share graphs by class, of weights of a class of ours, and of modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import LocalSource, TypeSource
from torch._dynamo.symbolic_convert import InstructionTranslator

from .optimize_contexts import is_ours
from .patches import SHARDED_WEIGHTS, Wrap, install


def guard_modules_of_frame(gm: torch.fx.GraphModule, names: Mapping[str, str]) -> None:
    """Guard the graph being compiled on the modules that its frame was called with, the top module excepted.

    After a graph break in a module's `forward` Dynamo compiles the rest once for all modules of that class. Where
    precision depends on a module's path, the other modules would get the decisions of the first.
    """
    local = InstructionTranslator.current_tx().output.root_tx.f_locals
    sources = {getattr(node, "_dynamo_source", None) for node in gm.graph.find_nodes(op="placeholder")}
    for source in {_base(source) for source in sources}:
        if isinstance(source, LocalSource) and names.get(str(id(local.get(source.local_name)))):
            install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def _base(source: Any) -> Any:
    while hasattr(source, "base"):
        source = source.base
    return source


def watch_inlined_modules(tell: Callable[[str], None]) -> Wrap:
    """A wrap of `VariableBuilder.wrap_module`: tells the name of a module of our backend that Dynamo traces through."""

    def wrap(original: Any) -> Any:
        def wrap_module(self: Any, value: Any) -> Any:
            if type(value) is torch._dynamo.OptimizedModule and is_ours(value.dynamo_ctx.callback):
                tell(type(value._orig_mod).__qualname__)
            return original(self, value)

        return wrap_module

    return wrap


def complete_modes(original: Any) -> Any:
    """A wrap of `TorchFunctionModeVariable.__init__`: Dynamo calls an object by what it knows of where its class is."""

    def init(self: Any, value: Any, source: Any = None, **kwargs: Any) -> None:
        original(self, value, source=source, **kwargs)
        if source is not None and getattr(self, "cls_source", source) is None:
            self.cls_source = TypeSource(source)

    return init


def is_static(placeholder: torch.fx.Node) -> bool:
    """Return True if Dynamo marked an input as static in memory: a parameter, a buffer, what an attribute holds."""
    return placeholder.meta.get("tensor_dict", {}).get("_dynamo_static_input_type") is not None


def is_registered(placeholder: torch.fx.Node) -> bool:
    """Return True if a graph input's source in Dynamo is a parameter or buffer of a module, or if it has no source."""
    name = getattr(getattr(placeholder, "_dynamo_source", None), "name", "")
    source = name() if callable(name) else name
    return not source or "._parameters[" in source or "._buffers[" in source


def see_as_parameters(subclass: type[Tensor], tell: Callable[[Tensor], None]) -> None:
    """Let Dynamo trace tensors of a subclass as if they were plain parameters; its guards tell them from these.

    It calls `tell(tensor)` where it compiles for another backend than ours. Raises AttributeError in a torch whose
    Dynamo is another.
    """

    def infer(original: Any) -> Any:
        return lambda value: None if type(value) is subclass else original(value)

    def watch(original: Any) -> Any:
        def wrap_tensor(self: Any, value: Any) -> Any:
            if type(value) is subclass and not is_ours(self.tx.output.compiler_fn):
                tell(value)
                self.install_guards(GuardBuilder.ID_MATCH)  # other modules of the class may not share the graph unseen
            return original(self, value)

        return wrap_tensor

    wraps: dict[str, Wrap] = {"builder.infer_subclass_type": infer, "VariableBuilder.wrap_tensor": watch}
    install(SHARDED_WEIGHTS, wraps)
