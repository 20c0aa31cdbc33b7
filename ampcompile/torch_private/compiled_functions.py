"""What AOTAutograd makes: the autograd function of a compiled graph, its arguments, results and backward.

And for audits, forward and backward as two graphs of plain ops, run by functions of ours.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch import config
from torch._functorch._aot_autograd.schemas import OutputType, ViewAndMutationMeta
from torch.fx import GraphModule

from . import patches
from .autocast import lowering_without_autocast

AutogradFunction = Any  # a class made by AOTAutograd
Backward = Callable[..., Any]
Interpret = Callable[[GraphModule], Callable[..., Any]]

_FRESH = {OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view}
_WITH_BASE = {OutputType.alias_of_intermediate, OutputType.alias_of_intermediate_save_as_output}


def is_backward(example_inputs: Sequence[Any]) -> bool:
    """Return True if a graph is from compiled autograd, which passes a list; its casts are those of the forward."""
    return any(isinstance(value, list) for value in example_inputs)


@contextlib.contextmanager
def functions_made() -> Iterator[list[AutogradFunction]]:
    """Collect the functions that AOTAutograd makes or loads from its cache meanwhile: one for a graph with gradients.

    It passes `CompiledFunction.apply` to a wrapper that is in the same module in all versions. Dynamo compiles in
    one thread at a time.
    """
    made: list[AutogradFunction] = []

    def wrap(original: Any) -> Any:
        def post_compile(self: Any, compiled_fn: Any, *args: Any, **kwargs: Any) -> Any:
            function = getattr(compiled_fn, "__self__", None)
            if isinstance(function, type) and issubclass(function, torch.autograd.Function):
                made.append(function)
            return original(self, compiled_fn, *args, **kwargs)

        return post_compile

    with patches.replaced("RuntimeWrapper.post_compile", wrap):
        yield made


def intercept(
    function: AutogradFunction,
    forward: Callable[[Any, Sequence[Any]], None],
    backward: Callable[[Backward, Any, Sequence[Any]], Any],
) -> None:
    """Call `forward(ctx, arguments)` ahead of each forward, and `backward(original, ctx, gradients)` instead of each.

    `original(ctx, gradients)` is the function's own backward. From 2.13 gradients come in one list, to be emptied.
    Dynamo skips torch's own frames. `disable` keeps it from tracing ours where compiled code calls `backward()`: that
    of 2.11 warns of every builtin it doesn't know.
    """
    own_forward, own_backward = function.forward, function.backward
    boxed = getattr(function, "boxed_grads_call", False)

    def forward_after(ctx: Any, *arguments: Any) -> Any:
        forward(ctx, arguments)
        return own_forward(ctx, *arguments)

    def call(ctx: Any, gradients: Any) -> Any:
        return own_backward(ctx, gradients) if boxed else own_backward(ctx, *gradients)

    @torch.compiler.disable
    def replacement(ctx: Any, *gradients: Any) -> Any:
        return backward(call, ctx, gradients[0] if boxed else gradients)

    patches.replace_on(function, "forward", staticmethod(forward_after))
    patches.replace_on(function, "backward", staticmethod(replacement))


def result_slots(function: AutogradFunction) -> list[tuple[int, bool] | None]:
    """Return, for each value that the function returns, the output of the graph that its gradient belongs to, and if
    it is the base of that output; None for views, which autograd sees outside of it.
    """
    meta: ViewAndMutationMeta = function.metadata
    slots: list[tuple[int, bool] | None] = [None] * meta.num_mutated_inp_runtime_indices
    slots += [(i, False) if info.output_type in _FRESH else None for i, info in enumerate(meta.output_info)]
    views = {info.base_idx: i for i, info in enumerate(meta.output_info) if info.output_type in _WITH_BASE}
    return [*slots, *((views[base], True) for base in range(meta.num_intermediate_bases))]


def writes_to_differentiated_inputs(function: AutogradFunction) -> bool:
    """Return True if the function returns new values for inputs, which then have it as their autograd history."""
    return function.metadata.num_mutated_inp_runtime_indices > 0


def written_arguments(function: AutogradFunction) -> list[int]:
    """Indices of the arguments that the compiled code itself writes to, such as running statistics."""
    return [i for i, info in enumerate(function.metadata.input_info) if info.mutates_data]


def takes_apart_subclasses(function: AutogradFunction) -> bool:
    """Return True if arguments or results are tensor subclasses, which the function unwraps and wraps."""
    return function.maybe_subclass_metadata is not None


def graph_is_kept() -> bool:
    """Return True if the backward now running was asked to keep the graph for another one."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


@contextlib.contextmanager
def within_graph_task() -> Iterator[None]:
    """Let checkpoints take a backward inside the one now running for a part of it: they recompute once for each."""
    task = torch._C._current_graph_task_id()
    if task == -1 or torch._C._get_graph_exec_group() is not None:
        yield
        return
    torch._C._set_graph_exec_group(task)  # type: ignore[arg-type]  # any key that is hashable
    try:
        yield
    finally:
        torch._C._set_graph_exec_group(None)


def survive_kept_graphs(function: AutogradFunction) -> None:
    """Make a backward with `retain_graph=True` leave the saved tensors as they are.

    Inductor's backward computes in the buffers that forward saved ("donated" ones), unless the very first backward
    kept its graph; AOTAutograd then raises if a later one does. That one gets clones instead.
    """
    own = function._backward_impl

    def backward_impl(ctx: Any, arguments: list[Any]) -> Any:
        donated = function.metadata.bw_donated_idxs
        if not donated or not graph_is_kept():
            return own(ctx, arguments)
        for i in donated:
            arguments[i] = arguments[i].clone()
        with config.patch(donated_buffer=False):
            return own(ctx, arguments)

    patches.replace_on(function, "_backward_impl", staticmethod(backward_impl))


def aot_interpreted(
    gm: GraphModule,
    inputs: Sequence[Any],
    forward: Interpret,
    backward: Interpret,
    under_autocast: bool = False,
    cut: Callable[..., Any] | None = None,
) -> Any:
    """Return AOTAutograd's callable for `gm`, which runs `forward(graph)` and `backward(graph)`; they return lists.

    The graphs are functional: nothing is written in place. Whatever backward reads is saved, nothing is recomputed, or
    what `cut`, a partitioner, leaves.
    `under_autocast`: the casts of the autocast now open become part of them.
    """
    from functorch.compile import default_partition, make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compiler(interpret: Interpret) -> Callable[..., Any]:
        return lambda graph, example_inputs: make_boxed_func(interpret(graph))

    with contextlib.nullcontext() if under_autocast else lowering_without_autocast():
        return aot_autograd(
            fw_compiler=compiler(forward),
            bw_compiler=compiler(backward),
            inference_compiler=compiler(forward),
            partition_fn=cut or default_partition,
        )(gm, list(inputs))


def name_backward_nodes(graph: torch.fx.Graph) -> None:
    """Give nodes of a backward graph the module stack of the forward op they differentiate, as `nn_module_stack`."""
    for node in graph.nodes:
        if "fwd_nn_module_stack" in node.meta:
            node.meta.setdefault("nn_module_stack", node.meta["fwd_nn_module_stack"])


def random_state() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The state of the generators of the CPU and of every GPU."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all()


def start_from(state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    """Restore this state of the generators: the numbers drawn after `random_state` are drawn again."""
    torch.set_rng_state(state[0])
    torch.cuda.set_rng_state_all(state[1])
