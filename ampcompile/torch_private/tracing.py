"""Dynamo's fake inputs, and `make_fx` above autocast: the private calls that capture is built on."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo  # registers the higher-order ops
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, detect_fake_mode
from torch._higher_order_ops.utils import reenter_make_fx
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import rebind_unbacked, statically_known_true
from torch.utils._python_dispatch import _disable_current_modes

from . import dispatcher, patches, pytree

transforms_are_active = torch._C._are_functorch_transforms_active  # vmap, grad and the like of torch.func
HOPS = torch.ops.higher_order


def fake_inputs(example_inputs: Sequence[Any]) -> tuple[list[Any], FakeTensorMode]:
    """Dynamo's example inputs as the fake tensors it traced with, symbolic sizes and sources included."""
    context = TracingContext.get()
    mode = context.fake_mode
    assert mode is not None

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or (isinstance(value, FakeTensor) and value.fake_mode is mode):
            return value
        symbolic = context.tensor_to_context.get(value)
        source = symbolic.tensor_source if symbolic is not None else None
        return mode.from_tensor(value, symbolic_context=symbolic, source=source)

    return [fake(value) for value in example_inputs], mode


@contextlib.contextmanager
def computing_on(mode: FakeTensorMode) -> Iterator[None]:
    """Compute with fake tensors of a mode. Unbacked sizes may be created anew; a user's saved-tensor hooks don't run.

    For symbolic sizes torch's Python decompositions are on: 2.11's own matmul of an expanded tensor needs numbers.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        if mode.shape_env is not None:
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
            if mode.shape_env.var_to_range:
                stack.enter_context(enable_python_dispatcher())
        stack.enter_context(torch._dynamo.utils._disable_saved_tensors_hooks_during_tracing())
        yield


def let_grouped_products_be_float32() -> None:
    """Make fake tensors accept the dtypes that `_grouped_mm` computes in besides bfloat16: float32 and float16.

    Eager mode runs them on all devices; the fake kernel of torch 2.11 to 2.15 raises.
    """

    def shaped(fake_mode: FakeTensorMode, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        def result(
            a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
        ) -> torch.Tensor:
            with fake_mode:
                return _create_grouped_mm_output_tensor(a, b, offs, out_dtype)

        dtypes = {operand.dtype for operand in args[:2]}
        return result(*args, **kwargs) if dtypes in ({torch.float32}, {torch.float16}) else NotImplemented

    patches.add_fake_kernel(torch.ops.aten._grouped_mm.default, shaped)


def is_of_fixed_layout(fake: torch.Tensor) -> bool:
    """Return True if a fake tensor's sizes and strides are numbers, none of them a symbol."""
    return all(isinstance(number, int) for number in (*fake.shape, *fake.stride(), fake.storage_offset()))


def is_compiling() -> bool:
    """Return True in this thread while Dynamo traces a frame, and while its graphs are compiled."""
    return TracingContext.try_get() is not None


def fakes_only() -> bool:
    """Return True if all computation is on fake tensors now. About 0.1 us."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


TakesApart = Callable[[OpOverload, Any, Any], bool]


def trace_pre_dispatch(run: Callable[..., Any], fakes: Sequence[Any], takes_apart: TakesApart) -> GraphModule:
    """`make_fx` above the Autocast key: composite ops and grad-mode and autocast regions stay nodes.

    The composite ops for which `takes_apart(op, args, kwargs)` is true are recorded as the ops they are made of.
    """
    trace = proxy_tensor.make_fx(_recording(run, takes_apart), pre_dispatch=True, tracing_mode="real")
    return trace(*fakes)


def trace_body(run: Callable[..., Any], fakes: Sequence[Any], takes_apart: TakesApart) -> GraphModule:
    """Trace the body of a higher-order op from inside `trace_pre_dispatch`, as a graph of its own."""
    # Outside of the surrounding trace: with symbolic sizes, that would record what is computed after the body's trace.
    with proxy_tensor._temp_remove_pre_dispatch_torch_function_mode(), proxy_tensor.disable_proxy_modes_tracing():
        return reenter_make_fx(_recording(run, takes_apart))(*fakes)


def _recording(run: Callable[..., Any], takes_apart: TakesApart) -> Callable[..., Any]:
    def traced(*args: Any) -> Any:
        mode = proxy_tensor.get_proxy_mode()
        record = mode.__torch_dispatch__

        def record_or_take_apart(op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if takes_apart(op, args, kwargs or {}):
                with mode:
                    return op.decompose(*args, **(kwargs or {}))
            if op is torch.ops.aten.detach_.default and args[0]._is_view():  # an alias of ours, see `_record_apart`
                return record_call("call_function", op, args, {}, args[0], mode.tracer)
            return _record_apart(mode.tracer.tensor_tracker, record, op, types, args, kwargs or {})

        # Looked up on the instance, there and here.
        patches.replace_on(mode, "__torch_dispatch__", record_or_take_apart)
        return run(*args)

    return traced


def _record_apart(slots: Any, record: Any, op: OpOverload, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record an op; where it returns its argument, return an alias, so that the argument keeps its own node.

    `h.float()` is `h` itself when `h` is float32 already. The tracer knows values by identity: every later use of
    `h` would read the cast, which stops being a no-op as soon as `h` is computed in a lower precision.
    """
    if not dispatcher.may_return_argument(op):
        return record(op, types, args, kwargs)
    before = {id(tensor): slots.get(tensor) for tensor in pytree.tensors_in(args, kwargs)}
    result = record(op, types, args, kwargs)

    def apart(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in before or slots.get(value) is before[id(value)]:
            return value
        alias = torch.ops.aten.alias(value)
        slots[alias], slots[value] = slots[value], before[id(value)]
        if before[id(value)] is None:
            del slots[value]
        return alias

    return pytree.tree_map_only(torch.Tensor, apart, result)


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Compute on fake tensors inside `make_fx` without recording anything."""
    with (
        proxy_tensor.disable_proxy_modes_tracing(),
        proxy_tensor._temp_remove_pre_dispatch_torch_function_mode(),
        proxy_tensor._temp_remove_metadata_torch_function_mode(),
    ):
        yield


def keep_symbols(node: Node, result: Any) -> None:
    """Give the result of a node that runs once more, on fakes, the symbols of sizes that the node had before."""
    mode = detect_fake_mode()
    if mode is not None and node.meta.get("unbacked_bindings"):
        rebind_unbacked(mode.shape_env, node, result)


def tracer() -> Any:
    """The tracer of the innermost `make_fx`."""
    mode = proxy_tensor.get_proxy_mode()
    assert mode is not None
    return mode.tracer


def record_call(
    op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, recorder: Any = None
) -> Any:
    """Add a call to the graph being traced, and make its result stand for the new node from now on."""
    recorder = recorder or tracer()
    arguments = pytree.tree_map(recorder.unwrap_proxy, (args, kwargs), is_leaf=lambda x: isinstance(x, GraphModule))
    recorder.graph.owning_module = recorder.root  # dead-code elimination asks it about modules
    proxy = recorder.create_proxy(op, target, *arguments)
    return proxy_tensor.track_tensor_tree(result, proxy, constant=None, tracer=recorder)


def record_state_change(target: Any, args: Any, kwargs: Any) -> Node:
    """Add a call about no tensor to the graph being traced; `args` may hold nodes that this returned before."""
    node = tracer().create_node("call_function", target, args, kwargs)
    node.meta["val"] = None
    return node


def fake_mode_of(gm: GraphModule) -> FakeTensorMode | None:
    """The mode of a graph's fake tensors; None if it has none."""
    values = (node.meta.get("val") for node in gm.graph.nodes)
    modes = (detect_fake_mode(value) for value in values if isinstance(value, torch.Tensor))
    return next((mode for mode in modes if mode is not None), None)


@contextlib.contextmanager
def on_fakes_of(gm: GraphModule) -> Iterator[None]:
    """Compute with a graph's fake tensors, autocast excluded."""
    mode = fake_mode_of(gm)
    if mode is None:
        yield
        return
    with computing_on(mode), torch._C._DisableAutocast():
        yield


@contextlib.contextmanager
def on_real_tensors() -> Iterator[None]:
    """Compute for real in the midst of tracing, autocast and gradients off."""
    with _disable_current_modes(), torch._C._DisableAutocast(), torch.no_grad():
        yield


def largest_magnitude(constant: torch.Tensor) -> float:
    """Return the largest finite magnitude in a real tensor, also inside a fake tensor mode; 0 if there is none."""
    with on_real_tensors():
        try:
            magnitudes = constant.abs() if constant.is_complex() else constant.double().abs()
            finite = magnitudes[magnitudes.isfinite()]
        except RuntimeError:  # a dtype that torch doesn't compute with, on which no guard acts
            return 0.0
        return float(finite.max()) if finite.numel() else 0.0


def indexing_by_tensors() -> contextlib.AbstractContextManager[Any]:
    """Keep `x[i]` with a tensor `i` an op, as flex_attention's functions need; else Python asks for its number."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def is_at_least(size: int | torch.SymInt, least: int) -> bool:
    """Return True if a size is at least this, whatever its symbols are; adds no guard."""
    return statically_known_true(size >= least)


def product_hint(*sizes: int | torch.SymInt) -> int | None:
    """The product of sizes, as traced, without adding a guard; None if one depends on data."""
    product = 1
    for size in sizes:
        if isinstance(size, torch.SymInt):
            if not size.node.has_hint():
                return None
            size = int(size.node.hint)
        product *= size
    return product


def elements_hint(value: torch.Tensor) -> int | None:
    """The number of elements of a tensor, as `product_hint`."""
    # The size of a nested tensor is that of `values()`, which holds its rows one behind the other.
    return product_hint(*(value.values() if value.is_nested else value).shape)
