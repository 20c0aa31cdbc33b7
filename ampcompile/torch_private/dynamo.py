"""Dynamo's optimize contexts, which wrap the callables that torch.compile returns; its treatment of some objects.

These are modules, which share graphs by class, weights of a class of ours, and modes. All of it is private.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch._dynamo import eval_frame, trace_rules
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import LocalSource, TypeSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.utils._python_dispatch import any_torch_dispatch_mode_on_stack

from . import marks
from .patches import SHARDED_WEIGHTS, Wrap, install
from .tracing import fakes_only, transforms_are_active


def unwrap_backend(backend: Any) -> Any:
    """The backend's function behind Dynamo's chain of callbacks, and behind what `torch.compile` wraps it in."""
    inner = eval_frame.innermost_backend(backend)
    return getattr(inner, "compiler_fn", inner)


def is_ours(backend: Any) -> bool:
    """Return True if a backend, as Dynamo holds it, is ours."""
    return hasattr(unwrap_backend(backend), "amp_options")


def wrap_call(
    wrap: Callable[[Any, Any, Any], Any],
    asked: Callable[[Any, bool | None, bool], tuple[bool | None, bool]],
    tell: Callable[[Any], None],
) -> Wrap:
    """A wrap of `OptimizeContext.__call__`: `wrap(backend, fn, compiled)` stands in for every callable it returns.

    `asked(backend, dynamic, fullgraph)` returns the `dynamic` and `fullgraph` to use, given torch.compile's arguments.
    `tell(fn)` is called where another backend than ours compiles again what is compiled.

    torch offers no public hook around a compiled call: torch.compile drops `backend_ctx_ctor`, and since 2.13
    `_ForceDispatchKeyGuard` undoes what it changes in the dispatch keys. Modules and classes come back through this
    call with their methods, so only functions are wrapped.
    """

    def wrap_context(original: Any) -> Any:
        def call(self: Any, fn: Any) -> Any:
            backend = eval_frame.innermost_backend(self.callback)
            wanted = asked(backend, self._dynamic, self.fullgraph)
            if wanted != (self._dynamic, self.fullgraph):
                self = _context_like(self, backend, *wanted)
            given, fn = fn, eval_frame.innermost_fn(fn)  # Dynamo compiles the original of what is compiled already
            looks = getattr(backend, "__module__", "") == eval_frame.__name__  # torch._dynamo.explain, and export
            if given is not fn and not looks and not is_ours(backend):
                tell(given)
            compiled = original(self, fn)
            if isinstance(fn, torch.nn.Module | type):
                return compiled
            callback = set_frame_callback(None)
            try:
                wrapped = wrap(backend, fn, compiled)
            finally:
                set_frame_callback(callback)
            if wrapped is not compiled:
                # Dynamo follows `_torchdynamo_orig_callable`, copied by functools.wraps, only if this matches.
                wrapped._torchdynamo_wrapper_id = id(wrapped)
            return wrapped

        marks.pass_over(call)
        return call

    return wrap_context


class _Apart(dict[str, Any]):
    """Options that equal no others."""

    def __eq__(self, other: object) -> bool:
        return self is other


def compile_apart(backend: Any) -> None:
    """Have Dynamo reuse no graph here that it made of the same code under equal options, as for another model.

    A backend without options, as that of `explain`, equals no other one.
    """
    options = backend.kwargs.get("options")
    if options is not None and not isinstance(options, _Apart):
        backend.kwargs["options"] = _Apart(options)


def compiles_nothing(fn: Any) -> bool:
    """Return True if `fn` is what `module.compile()` compiles of a class of torch.nn, whose methods Dynamo skips.

    `torch.compile(module)` adds a frame that Dynamo traces, and newer releases (2.15) do so in both cases.
    """
    module = getattr(fn, "__self__", None)
    if not isinstance(module, torch.nn.Module) or fn.__name__ != "_call_impl":
        return False
    framed = getattr(eval_frame.OptimizedModule, "_should_wrap_module_call_impl", None)
    return bool(trace_rules.check(module.forward)) and not (framed and framed(fn))


set_frame_callback = eval_frame.set_eval_frame  # returns the one before


def cannot_compile() -> bool:
    """Return True where Dynamo would skip a callable's code, and go on to skip it for good: under some dispatch modes
    and all transforms of torch.func but `functionalize`. And on fake tensors, which have no memory for compiled code.
    """
    if torch._C._len_torch_dispatch_stack() and (fakes_only() or any_torch_dispatch_mode_on_stack()):
        return True
    return transforms_are_active() and any(
        layer.key() is not TransformType.Functionalize for layer in get_interpreter_stack() or ()
    )


def run_uncompiled(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a callable eagerly, but for what is compiled of it by now; on fake tensors, all of it."""
    callback = set_frame_callback(None if fakes_only() else False)
    try:
        return fn(*args, **kwargs)
    finally:
        set_frame_callback(callback)


def _context_like(context: Any, backend: Any, dynamic: bool | None, fullgraph: bool) -> Any:
    """Return an optimize context like the one given, but for the two settings, which it holds in closures."""
    hooks, convert = context._hooks, getattr(context.callback, "_torchdynamo_orig_backend", None)
    others = {
        "recompile_limit": getattr(convert, "_recompile_limit", None),
        "isolate_recompiles": getattr(context, "_isolate_recompiles_id", -1) != -1,
        "shapes_spec": getattr(context, "_shapes_spec", None),
    }
    return torch._dynamo.optimize(
        backend,
        nopython=fullgraph,
        dynamic=dynamic,
        guard_filter_fn=hooks.guard_filter_fn if hooks is not None else None,
        **{name: value for name, value in others.items() if value},  # newer than 2.11
    )


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
    """A wrap of `TorchFunctionModeVariable.__init__`: adds where the class is, without which Dynamo fails."""

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
