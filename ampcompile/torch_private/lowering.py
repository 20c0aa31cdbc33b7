"""Who compiles a rewritten graph: Inductor, or AOTAutograd with eager kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._ops import HigherOrderOperator

from . import patches

OnJointGraph = Callable[[torch.fx.GraphModule], Any]
ROUNDS = "low_precision_pointwise_barrier"
"""In a node's `meta`: Inductor rounds the 16-bit numbers that this elementwise op reads, and those that it gives."""


def stores_products() -> bool:
    """Whether products are in memory before others read them; templates of max-autotune hand on what they add up."""
    from torch._inductor import config

    return not (config.max_autotune or config.max_autotune_gemm)


class _JointGraphPass(CustomGraphPass):
    """What is done to the graph after differentiation, in Inductor's form: known to its caches by `key`."""

    def __init__(self, act: OnJointGraph, key: str) -> None:
        self.act, self.key = act, key

    def __call__(self, graph: torch.fx.Graph) -> None:
        owner = graph.owning_module  # whose `graph` Inductor hands over, in every release from 2.11 to 2.15
        assert owner is not None and owner.graph is graph
        self.act(owner)

    def uuid(self) -> str:
        return self.key


class _Decompositions(dict[Any, Callable[..., Any]]):
    """A table that Inductor's caches (2.13 on) can take into their keys: they pickle it, to hash what that gives.

    Torch's version is in every key already, and what our files hold is in the key of what is done on the joint graph.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        ours = sorted(str(op) for op, function in self.items() if function.__module__.startswith("ampcompile."))
        return str, (" ".join(ours),)


def inductors_decompositions(kept: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """A copy of the table by which Inductor has ops taken apart; an entry that gives NotImplemented keeps its op.

    `kept`: ops of the table for which that may happen. Inductor has no code for them, so it calls eager's kernels.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import fallback_handler

    for op in kept:
        patches.add_lowering(op, fallback_handler(op, add_to_fallback_set=False))
    return _Decompositions(select_decomp_table())


def inductor(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    config: dict[str, Any],
    on_joint_graph: OnJointGraph,
    key: str,
    decompositions: dict[Any, Callable[..., Any]],
) -> Callable[..., Any]:
    """Compile with Inductor; `on_joint_graph` sees forward and backward together, or an inference graph.

    `key`: another one wherever `on_joint_graph`, a decomposition or a lowering of ours may do another thing.
    """
    from torch._inductor.compile_fx import compile_fx

    patches.install(patches.SCHEDULING, {"SchedulerNode.recompute_size_and_body": _after_the_same_writes})
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta.pop("val", None)  # with "cpp_wrapper" read in the inputs' place, and captured fakes want no gradient
    settings = {**config, "joint_custom_pre_pass": _JointGraphPass(on_joint_graph, key)}
    compiled: Any = compile_fx(gm, list(inputs), config_patches=settings, decompositions=decompositions)
    return compiled


def _after_the_same_writes(recompute: Callable[..., None]) -> Callable[..., None]:
    """Loops that are computed anew, to be fused, read buffers by their first names: they get those of later writes."""

    def recompute_and_rename(node: Any, *args: Any, **kwargs: Any) -> None:
        recompute(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    return recompute_and_rename


_CALLED_IN_COMPILED_CODE = ("associative_scan", "cond", "invoke_subgraph", "map_impl", "scan", "while_loop")


def config_for_bodies(gm: torch.fx.GraphModule) -> dict[str, bool]:
    """Inductor's settings for a graph with loops, branches or nested regions: each buffer is written once.

    It would write over what caller or body still reads, and gradients are off by their own size: `while_loop` in 2.11
    and 2.13, nested regions in all versions. In part known as https://github.com/pytorch/pytorch/pull/193960.
    """
    graphs = (module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule))
    calls = (node.target for graph in graphs for node in graph.nodes if node.op == "call_function")
    if any(isinstance(f, HigherOrderOperator) and f.name() in _CALLED_IN_COMPILED_CODE for f in calls):
        return {"inplace_buffers": False, "allow_buffer_reuse": False}
    return {}


def aot_eager(gm: torch.fx.GraphModule, inputs: Sequence[Any], on_joint_graph: OnJointGraph) -> Callable[..., Any]:
    """AOTAutograd with eager kernels, as the backend of that name, with passes on the joint or inference graph."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def partition(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        on_joint_graph(joint)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def inference(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        on_joint_graph(graph)
        return boxed_nop(graph, example_inputs)

    compiler = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return compiler(gm, list(inputs))


def forget_output_values(gm: torch.fx.GraphModule) -> None:
    """Drop the fake values of what nested compile regions return, bodies of bodies included.

    `invoke_subgraph` reads there whether an output wants a gradient, and captured fakes are detached; without
    them it runs the body to find out.
    """
    for node in gm.graph.find_nodes(op="get_attr"):
        body = getattr(gm, str(node.target), None)
        if isinstance(body, torch.fx.GraphModule):
            forget_output_values(body)
            if any(user.target is torch.ops.higher_order.invoke_subgraph for user in node.users):
                for returned in body.graph.output_node().all_input_nodes:
                    returned.meta.pop("val", None)


def lower_as_call(op: Any, called: Any, arguments: Callable[..., tuple[Any, ...]]) -> None:
    """Have Inductor's code call `called(*arguments(...))` for `op`, past the dispatcher and Python."""
    from torch._inductor.lowering import fallback_handler

    call = fallback_handler(called, add_to_fallback_set=False)
    patches.add_lowering(op, lambda *args: call(*arguments(*args)))


def channels_last(x: Any) -> Any:
    """A 4-D tensor of Inductor's, laid out channels-last, in dimensions of size 1 too: ATen looks at their strides."""
    from torch._inductor.ir import ExternKernel
    from torch._prims_common import make_channels_last_strides_for

    return ExternKernel.require_exact_strides(x, make_channels_last_strides_for(x.get_size()))
