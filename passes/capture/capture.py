"""Trace Dynamo's torch-level graph to pre-dispatch ATen: one spelling of each op, a fake tensor on every node.

The Autocast dispatch key sees pre-dispatch ATen in eager mode (`aten.linear`, `aten.cross_entropy_loss` ... kept
whole), so rules apply to the ops that the user called. Capture runs under the autocast state of the call, so the fakes
have the dtypes that eager autocast gives: a check on every later decision.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node, map_arg
from torch.fx.graph import CodeGen

from ampcompile.dtypes import LOW, representable
from ampcompile.passes.analysis import higher_order
from ampcompile.passes.graph import (
    ENTER,
    EXIT,
    UNDECIDED,
    current_module_path,
    device_type_of,
    graphs,
    held_tensors,
    is_below_autograd,
    placeholders,
)
from ampcompile.policy import Policy
from ampcompile.torch_private import autocast, dispatcher, pytree, tracing
from ampcompile.torch_private.dispatcher import FakeTensor, FakeTensorMode, HigherOrderOperator, OpOverload

from . import outline

_TRACED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_RECORDED = frozenset({ENTER, EXIT, autocast.SET_GRAD_ENABLED})  # by make_fx itself


class _Capture(Interpreter):
    """Runs a Dynamo graph on fakes inside `make_fx`; higher-order ops stay calls, autocast regions are entered."""

    def __init__(self, gm: GraphModule, bodies: _Bodies) -> None:
        super().__init__(outline.outline(gm))
        self.bodies = bodies
        self.open: list[Callable[[], Any]] = []  # functions that leave the regions now entered
        self.state_changes: dict[Node, Node] = {}  # state changes of the graph, with their captured nodes

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.callback(lambda: [leave() for leave in reversed(self.open)])  # after an error
            return super().run(*args, **kwargs)

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if self.bodies.keeps_symbols:
            tracing.keep_symbols(n, result)
        if n.op == "call_function" and "example_value" not in n.meta and self._is_state_change(n, result):
            args, kwargs = map_arg((n.args, n.kwargs), self.state_changes.__getitem__)
            self.state_changes[n] = tracing.record_state_change(n.target, args, kwargs)
            if n.target is autocast.ENTER_INFERENCE:
                self.open.append(lambda: autocast.EXIT_INFERENCE(result))
            elif n.target is autocast.EXIT_INFERENCE:
                self.open.pop()
        return result

    def _is_state_change(self, n: Node, result: Any) -> bool:
        """True for a call that computes no value: inference mode, choice of attention kernels, current device."""
        if n.target in _RECORDED or isinstance(n.target, OpOverload | HigherOrderOperator):
            return False
        leaves = pytree.tree_leaves(result)
        return self.state_changes.keys() >= set(n.all_input_nodes) and not any(
            isinstance(leaf, _TRACED) for leaf in leaves
        )

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is ENTER:
            device_type, dtype, enabled, _ = args
            region = torch.autocast(device_type, dtype, enabled, cache_enabled=False)
            region.__enter__()  # records itself
            self.open.append(lambda: region.__exit__(None, None, None))
            return region
        if target is EXIT:
            return self.open.pop()()
        if target is higher_order.HOPS.wrap_with_autocast:  # how torch.export writes a region
            device_type, dtype, enabled, _, body, *inputs = args
            with torch.autocast(device_type, dtype, enabled, cache_enabled=False):  # records itself
                return _Capture(body, self.bodies).run(*inputs)
        if isinstance(target, HigherOrderOperator):
            return self._higher_order(target, args, kwargs)
        if is_below_autograd(target):
            with tracing.untraced():
                result = target(*args, **kwargs)
            return tracing.record_call("call_function", target, args, kwargs, result)
        if target is operator.setitem and overflows(args[2], args[0]):
            # torch would convert the number to the dtype of its destination: an infinity.
            args = (*args[:2], torch.tensor(float(args[2]), dtype=torch.float32, device=args[0].device))
        return super().call_function(target, args, kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.fetch_attr(target)
        if isinstance(module, outline.OutlinedPart):
            module.note(args)
            with tracing.untraced():
                result = module(*args)
            name = self.bodies.attach(module, outline.OUTLINED)
            return tracing.record_call("call_module", name, args, {}, result)
        if target.startswith("submod_"):  # one of the parts into which `outline` split the graph
            return _Capture(module, self.bodies).run(*args)
        return super().call_module(target, args, kwargs)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = self.fetch_attr(target)
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        mode = tracing.detect_fake_mode()
        assert mode is not None
        with tracing.untraced():
            fake = mode.from_tensor(value)
        return tracing.record_call("get_attr", self.bodies.attach_tensor(value), (), {}, fake)

    def _higher_order(self, hop: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        replaced: dict[int, GraphModule] = {}
        outputs: list[Any] = []
        for body, graph in higher_order.each_body(hop, args):
            with tracing.untraced():
                inputs = body.inputs(args, outputs)
            replaced[id(graph)] = self.bodies.captured(graph, inputs, body)
            if hop is higher_order.HOPS.autograd_function_apply:
                with tracing.untraced():
                    outputs.append(replaced[id(graph)](*inputs))
        args, kwargs = pytree.tree_map(
            lambda leaf: replaced.get(id(leaf), leaf), (args, kwargs), is_leaf=higher_order.is_graph
        )
        if hop is higher_order.HOPS.invoke_subgraph:  # torch's caches know it by its second argument
            args = (args[0], f"{args[1]}_{self.bodies.name(args[0])}", *args[2:])
        with tracing.untraced():
            result = higher_order.call_on_fakes(hop, args, kwargs)
        return tracing.record_call("call_function", hop, args, kwargs, result)


def overflows(value: Any, destination: Any) -> bool:
    """True if a number would become infinite when written into a low-precision tensor."""
    if not isinstance(value, int | float) or not isinstance(destination, torch.Tensor):
        return False
    return destination.dtype in LOW and not representable(value, destination.dtype)


class _Bodies:
    """The graphs and constants that captured nodes refer to, attached to the graphs that use them."""

    def __init__(self, takes_apart: tracing.TakesApart, held: dict[str, torch.Tensor], keeps_symbols: bool) -> None:
        self._takes_apart = takes_apart
        self.keeps_symbols = keeps_symbols
        self._held = {id(tensor): name for name, tensor in held.items()}  # by the graph, while it is captured
        self._captured: dict[Any, GraphModule] = {}
        self._names: dict[GraphModule, str] = {}
        self._count = 0

    def captured(self, graph: GraphModule, inputs: list[Any], body: higher_order.Body) -> GraphModule:
        """The capture of a body; calls with other dtypes or under another region have another capture."""
        # Sizes as text: symbols aren't hashable.
        leaves = tuple((t.dtype, str(tuple(t.shape))) if isinstance(t, torch.Tensor) else str(t) for t in inputs)
        states = autocast.autocast_states().items()
        key = (graph, leaves, tuple(states), torch.is_grad_enabled())
        if key not in self._captured:

            def run(*args: Any) -> Any:
                with body.mode():
                    return _Capture(graph, self).run(*args)

            with nullcontext() if body.autocast else autocast.autocast_disabled():
                captured = tracing.trace_body(run, inputs, self._takes_apart)
            captured.meta.update(graph.meta)
            self._names[captured] = self.attach(captured, "amp_body_")
            self._captured[key] = captured
        return self._captured[key]

    def name(self, body: GraphModule) -> str:
        """The attribute name of a captured body."""
        return self._names[body]

    def attach_tensor(self, value: torch.Tensor) -> str:
        """`attach` for a tensor; one that Dynamo's graph holds as an attribute keeps its name."""
        if (name := self._held.get(id(value))) is None:
            return self.attach(value, "amp_constant_")
        setattr(tracing.tracer().root, name, value)
        return name

    def attach(self, value: Any, prefix: str) -> str:
        """Make a value an attribute of the graph being traced; return the attribute's name."""
        name = f"{prefix}{self._count}"
        self._count += 1
        setattr(tracing.tracer().root, name, value)
        return name


def _finish(captured: GraphModule, original: GraphModule) -> GraphModule:
    """Give the captured graph Dynamo's input names, and the marks by which Inductor knows static inputs."""
    for node, source in zip(placeholders(captured), placeholders(original), strict=True):
        node._rename(source.name)
        node.target = node.name
        node.meta = {**source.meta, "val": node.meta.get("val")}
        node.meta.pop("grapharg", None)  # a weak reference to the real input, for which `swap_tensors` would refuse it
        if hasattr(source, "_dynamo_source"):
            node._dynamo_source = source._dynamo_source
    held = held_tensors(original)
    for graph in graphs(captured):
        # AOTAutograd takes registered parameters and buffers for inputs named by Dynamo.
        for name, constant in [*graph._parameters.items(), *graph._buffers.items()]:
            if name not in held:
                delattr(graph, name)
                graph.__dict__[name] = constant
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.item.default):
            if node.meta.get("val") is None and not node.users:  # reads a number that tracing made a constant
                graph.graph.erase_node(node)
    captured.meta.update(original.meta)
    captured.meta[UNDECIDED] = True
    if hasattr(original, "_param_name_to_source"):
        captured._param_name_to_source = original._param_name_to_source
    captured.graph.set_codegen(CodeGen())  # inputs and outputs are flat
    captured.recompile()
    return captured


def capture(
    gm: GraphModule, fakes: list[Any], mode: FakeTensorMode, policy: Policy, keeps_symbols: bool = False
) -> GraphModule:
    """Trace `gm` on `fakes` to pre-dispatch ATen, under the autocast and grad mode now in force.

    A composite op inside which `policy` has rules is decomposed until they apply, as in eager autocast.
    `keeps_symbols`: sizes that depend on data keep their symbols from `gm`.
    """

    def takes_apart(op: OpOverload, args: Any, kwargs: Any) -> bool:
        if not dispatcher.is_composite(op):
            return False
        device_type = device_type_of(pytree.tree_leaves((args, kwargs)))
        return device_type is not None and policy.needs_decomposition(op, device_type, current_module_path())

    with ExitStack() as stack:
        # Autocast's cache would keep casts of fake weights.
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))  # restores it if the graph changes it
        stack.enter_context(tracing.computing_on(mode))
        stack.enter_context(torch.fx.traceback.preserve_node_meta())
        traced = tracing.trace_pre_dispatch(
            _Capture(gm, _Bodies(takes_apart, held_tensors(gm), keeps_symbols)).run, fakes, takes_apart
        )
    for graph in graphs(traced):
        for node in graph.graph.find_nodes(op="get_attr"):
            assert not isinstance(getattr(graph, str(node.target), None), FakeTensor), f"fake constant {node}"
    return _finish(traced, gm)
