"""Dynamo's torch-level graph, rewritten as pre-dispatch ATen: one spelling, a fake tensor on every node.

Pre-dispatch ATen is what the Autocast dispatch key sees in eager mode (`aten.linear`, `aten.cross_entropy_loss` ...
kept whole), so a rule is applied to the op the user called. Capture runs under the autocast state of the call, so
the fakes carry the dtypes that eager autocast gives: a check on every decision made later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ampcompile import compat, rules

from . import higher_order, opaque
from .graph import ENTER, EXIT, bodies, placeholders

Decompositions = Mapping[OpOverload, Callable[..., Any]]


class DistinctResults(TorchFunctionMode):
    """Has every function that returns its argument unchanged return an alias of it instead.

    `y = h.float()` is `h` itself when `h` is float32 already. Recorded by tensor identity, every later use of `h`
    would then read the cast, which stops being a no-op as soon as `h` is computed in lower precision.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        mode = proxy_tensor.get_proxy_mode()
        name = getattr(func, "__name__", "")
        if mode is None or name.endswith("_") or name.startswith("__i"):
            return func(*args, **(kwargs or {}))
        slots = mode.tracer.tensor_tracker
        before = [
            (t, slots.get(t)) for t in pytree.arg_tree_leaves(*args, **(kwargs or {})) if isinstance(t, torch.Tensor)
        ]
        result = func(*args, **(kwargs or {}))
        for tensor, slot in before:
            if result is tensor and slot is not None and slots.get(tensor) is not slot:
                with compat.untraced():
                    result = torch.ops.aten.alias(tensor)
                slots[result], slots[tensor] = slots[tensor], slot
                break
        return result


class _Capture(Interpreter):
    """Runs a Dynamo graph on fakes inside `make_fx`; higher-order ops stay calls, regions are really entered."""

    def __init__(self, gm: GraphModule, captured: dict[Any, GraphModule]) -> None:
        super().__init__(opaque.outline(gm))
        self.captured = captured  # bodies already captured, by (body, what it was called with)
        self.regions: list[torch.autocast] = []

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is ENTER:
            node = super().call_function(target, args, kwargs)
            device_type, dtype, enabled, _ = args
            self.regions.append(torch.autocast(device_type, dtype, enabled, cache_enabled=False))
            self.regions[-1].__enter__()
            return node
        if target is EXIT:
            self.regions.pop().__exit__(None, None, None)
        if isinstance(target, HigherOrderOperator):
            return self._higher_order(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.fetch_attr(target)
        if isinstance(module, opaque.LeftAlone):
            with compat.untraced():
                result = module(*args)
            return self._record("call_module", self._attach(module, opaque.OUTLINED), result, args, {})
        if target.startswith("submod_"):  # what `outline` split off around the stretches left alone
            return _Capture(module, self.captured).run(*args)
        return super().call_module(target, args, kwargs)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = self.fetch_attr(target)
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        mode = torch._guards.detect_fake_mode()
        assert mode is not None
        with compat.untraced():
            fake = mode.from_tensor(value)
        return self._record("get_attr", self._attach(value, "amp_constant_"), fake, (), {})

    def _higher_order(self, hop: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        replaced: dict[int, GraphModule] = {}
        outputs: list[Any] = []
        for body, graph in higher_order.each_body(hop, args):
            with compat.untraced():
                inputs = body.inputs(args, kwargs, outputs)
            replaced[id(graph)] = self._body(graph, inputs)
            if hop is higher_order.HOPS.autograd_function_apply:
                with compat.untraced():
                    outputs.append(replaced[id(graph)](*inputs))
        args, kwargs = pytree.tree_map(
            lambda leaf: replaced.get(id(leaf), leaf), (args, kwargs), is_leaf=higher_order.is_graph
        )
        with compat.untraced():
            result = higher_order.call_on_fakes(hop, args, kwargs)
        return self._record("call_function", hop, result, args, kwargs)

    def _body(self, graph: GraphModule, inputs: list[Any]) -> GraphModule:
        leaves = tuple((t.dtype, tuple(t.shape)) if isinstance(t, torch.Tensor) else str(t) for t in inputs)
        state = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
        key = (id(graph), leaves, state, torch.is_grad_enabled())
        if key not in self.captured:
            with proxy_tensor._temp_remove_pre_dispatch_torch_function_mode():
                body = compat.trace_body(lambda *xs: _Capture(graph, self.captured).run(*xs), inputs)
            body.meta.update(graph.meta)
            self._attach(body, "amp_body_")
            self.captured[key] = body
        return self.captured[key]

    def _attach(self, value: Any, prefix: str) -> str:
        root = _tracer().root
        name = next(f"{prefix}{i}" for i in range(10**6) if not hasattr(root, f"{prefix}{i}"))
        setattr(root, name, value)
        return name

    def _record(self, op: str, target: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tracer = _tracer()
        arguments = pytree.tree_map(tracer.unwrap_proxy, (args, kwargs), is_leaf=higher_order.is_graph)
        proxy = tracer.create_proxy(op, target, *arguments)
        return proxy_tensor.track_tensor_tree(result, proxy, constant=None, tracer=tracer)


def _tracer() -> Any:
    mode = proxy_tensor.get_proxy_mode()
    assert mode is not None
    return mode.tracer


@cache
def decompositions(device_type: str) -> Decompositions:
    """Composite ops to take apart on a device type, because ops with a rule hide inside them."""
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
        if isinstance(op, OpOverload) and rules.composite_needs_decomposition(op, device_type):
            found[op] = op.decompose
    return found


def _with_names_of(captured: GraphModule, original: GraphModule) -> GraphModule:
    """The captured graph with Dynamo's input names and what Inductor reads to know which inputs are static."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    sources = iter(placeholders(original))
    for node in captured.graph.nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        source = next(sources)
        copies[node] = graph.placeholder(source.name)
        copies[node].meta = {**source.meta, "val": node.meta.get("val")}
        if hasattr(source, "_dynamo_source"):
            copies[node]._dynamo_source = source._dynamo_source  # type: ignore[attr-defined]
    named = GraphModule(captured, graph)
    named.meta.update(original.meta)
    if hasattr(original, "_param_name_to_source"):
        named._param_name_to_source = original._param_name_to_source
    return named


def capture(
    gm: GraphModule, fakes: list[Any], mode: FakeTensorMode, decompositions: Decompositions | None = None
) -> GraphModule:
    """Trace `gm` on `fakes` to pre-dispatch ATen, under the autocast and grad mode now in force.

    Composite ops in `decompositions` are taken apart until an op with a rule appears, as eager autocast does.
    """
    captured: dict[Any, GraphModule] = {}

    def run(*args: Any) -> Any:
        with DistinctResults():
            return _Capture(gm, captured).run(*args)

    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # it would keep casts of fake weights
    try:
        with mode, torch.fx.traceback.preserve_node_meta(), compat.fresh_symbols_allowed(mode):
            traced = compat.trace_pre_dispatch(run, fakes, decompositions or {})
    finally:
        torch.set_autocast_cache_enabled(cache)
    for graph in [traced, *(body for _, body in bodies(traced))]:
        for node in graph.graph.find_nodes(op="get_attr"):
            assert not isinstance(getattr(graph, str(node.target), None), FakeTensor), f"fake constant {node}"
    return _with_names_of(traced, gm)
