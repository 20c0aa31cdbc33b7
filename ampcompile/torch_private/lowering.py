"""Compile a rewritten graph by Inductor, or by AOTAutograd with eager kernels."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, SubclassGetAttrAOTInput
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._ops import HigherOrderOperator

from . import patches
from .cuts import Cutter, OnCut, run_as_it_is
from .dispatcher import TORCH

OnJointGraph = Callable[[torch.fx.GraphModule], Any]
ROUND_AS_EAGER = "low_precision_pointwise_barrier"
"""Key in a node's `meta`: Inductor rounds the 16-bit operands of this elementwise op, and its result."""
WRITE_TO_MEMORY = "inductor_realize_to_strides"
"""Key in a node's `meta`: Inductor writes its value to memory, and others read it there."""


CASTS_NEED_MARKS = TORCH < (2, 13)
"""If Inductor rounds at a cast only if the cast is marked; on the CPU it does so never."""


def calls_kernel(op: Any) -> bool:
    """Return True if Inductor has no code for an op, and calls eager's kernel."""
    from torch._inductor.lowering import fallbacks, lowerings

    return op in fallbacks or op not in lowerings


def stores_products() -> bool:
    """Return True if products are stored before others read them; max-autotune's templates pass on unrounded sums."""
    from torch._inductor import config

    return not (config.max_autotune or config.max_autotune_gemm)


class _JointGraphPass(CustomGraphPass):
    """Our passes on the joint graph as Inductor's custom pass, identified in its caches by `key`."""

    def __init__(self, act: OnJointGraph, key: str) -> None:
        self.act, self.key = act, key

    def __call__(self, graph: torch.fx.Graph) -> None:
        owner = graph.owning_module  # Inductor passes the `graph` of this, in every release from 2.11 to 2.15
        assert owner is not None and owner.graph is graph
        self.act(owner)

    def uuid(self) -> str:
        return self.key


def hash_of_files(paths: Sequence[Path]) -> str:
    """A hash over the names and texts of files; sizes too, so that no text may move from one to the next."""
    names = " ".join(f"{path.parent.name}/{path.name} {path.stat().st_size}" for path in paths)
    return get_hash_for_files(tuple(map(str, paths)), names).hex()


class _Decompositions(dict[Any, Callable[..., Any]]):
    """A decomposition table that Inductor's caches (2.13 on) can pickle and hash, for their keys.

    torch's version is in every key already, and the contents of our files are in the key of the joint graph's pass.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        ours = sorted(str(op) for op, function in self.items() if function.__module__.startswith("ampcompile."))
        return str, (" ".join(ours),)


def inductors_decompositions(kept: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """Return a copy of Inductor's decomposition table; an entry that returns NotImplemented keeps its op.

    `kept`: ops of the table for which that may happen. Inductor has no code for them, so it calls eager's kernels.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import fallback_handler

    for op in kept:  # not in Inductor's own set of fallbacks, by which other backends' graphs are compiled
        patches.add_lowering(op, fallback_handler(op, add_to_fallback_set=False))
    return _Decompositions(select_decomp_table())


def inductor(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    config: dict[str, Any],
    on_joint_graph: OnJointGraph,
    key: str,
    decompositions: dict[Any, Callable[..., Any]],
    before_partition: OnJointGraph | None = None,
    on_cut: OnCut | None = None,
    cutter: Cutter | None = None,
) -> Callable[..., Any]:
    """Compile with Inductor; `on_joint_graph` gets forward and backward as one graph, or an inference graph.

    `before_partition` gets it after Inductor's own passes on it. `key`: differs wherever one of the two, a
    decomposition or a lowering of ours may do something different. `on_cut` gets forward and backward; then no code is
    generated, no cache is asked, and what is returned runs the graphs with eager kernels. `cutter`: cuts instead of
    torch's own partitioner.
    """
    from torch._inductor.compile_fx import compile_fx

    patches.install(
        patches.SCHEDULING,
        {
            "SchedulerNode.recompute_size_and_body": _rename_after_recompute,
            "Scheduler.fusable_weak_dep": _fuse_with_no_later_name,
            "lowering.mutate_to": _write_after_earlier_writes,
            "AsyncCompile.triton": _without_advice,
        },
    )
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta.pop("val", None)  # with "cpp_wrapper" read instead of the inputs, and captured fakes require no grad
    # After the user's settings, which may name a pass too: without ours `weight_copy` would stay, which never runs.
    settings = {**config, "joint_custom_pre_pass": _JointGraphPass(on_joint_graph, key)}
    if before_partition is not None:
        settings["joint_custom_post_pass"] = _JointGraphPass(before_partition, key)
    given: dict[str, Any] = {}
    if on_cut is not None:
        cutter = cutter or Cutter(settings.get("custom_partitioner_fn"), on_cut)
        given["inner_compile"] = run_as_it_is
    if cutter is not None:
        settings["custom_partitioner_fn"] = cutter
    with nullcontext() if on_cut is None else functorch_config.patch(enable_autograd_cache=False):
        compiled: Any = compile_fx(gm, list(inputs), config_patches=settings, decompositions=decompositions, **given)
    return compiled


def _without_advice(compile_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Don't warn, as a kernel of our graphs is compiled, that it takes Triton's libdevice for want of a CUDA toolkit's.

    Inductor asks for the toolkit's where it is told to round. Stock Inductor takes Triton's, and says nothing.
    """

    def compile_quietly(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor import config

        if not isinstance(config.joint_custom_pre_pass, _JointGraphPass):  # another backend's: the advice is for it
            return compile_kernel(*args, **kwargs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*using Triton's bundled libdevice", UserWarning)
            return compile_kernel(*args, **kwargs)

    return compile_quietly


def _rename_after_recompute(recompute: Callable[..., None]) -> Callable[..., None]:
    """Reapply the renames of mutated buffers to reads after loop bodies are recomputed, which is done to fuse them."""

    def recompute_and_rename(node: Any, *args: Any, **kwargs: Any) -> None:
        recompute(node, *args, **kwargs)
        # Else the node depends on a buffer's first write alone, and may run before the next one.
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    return recompute_and_rename


def _write_after_earlier_writes(mutate_to: Callable[..., Any]) -> Callable[..., Any]:
    """Write a whole value into its buffer if a write through a view comes before.

    Given another buffer instead, as up to 2.13, the value's views would be written there, after all.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def write(changed: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        box = changed.data if isinstance(changed, ir.TensorBox) else changed
        buffer = box.data if isinstance(box, ir.StorageBox) else None
        if isinstance(buffer, ir.Buffer) and buffer.get_name() in V.graph.mutated_buffers:
            ir.MutationLayoutSHOULDREMOVE.realize_into(value, box, kwargs.get("unsafe_alias", False))
            return changed
        return mutate_to(changed, value, *args, **kwargs)

    return write


def _fuse_with_no_later_name(fusable: Callable[..., bool]) -> Callable[..., bool]:
    """Don't put a write into the loop of a read that names the buffer after an earlier write.

    Up to 2.13 such a read is overlooked where it is decided if both are of the same place.
    """

    def fusable_unless_renamed(scheduler: Any, dep: Any, reader: Any, writer: Any) -> bool:
        real = scheduler.mutation_real_name
        names = {read.name for read in reader.read_writes.reads} - {real[dep.mutating_buf]}
        renamed = any(real.get(name) == real[dep.mutating_buf] for name in names)
        return not renamed and fusable(scheduler, dep, reader, writer)

    return fusable_unless_renamed


_CALLED_IN_COMPILED_CODE = ("associative_scan", "cond", "invoke_subgraph", "map_impl", "scan", "while_loop")


def config_for_bodies(gm: torch.fx.GraphModule) -> dict[str, bool]:
    """Inductor's settings for a graph with loops, branches or nested regions: each buffer is written once.

    Otherwise it overwrites buffers that caller or body still reads, and gradients are off by their size: `while_loop`
    in 2.11 and 2.13, nested regions in all versions. Reported in part: https://github.com/pytorch/pytorch/pull/193960.
    """
    graphs = (module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule))
    calls = (node.target for graph in graphs for node in graph.nodes if node.op == "call_function")
    if any(isinstance(f, HigherOrderOperator) and f.name() in _CALLED_IN_COMPILED_CODE for f in calls):
        return {"inplace_buffers": False, "allow_buffer_reuse": False}
    return {}


def config_for_rounding(rounds: bool, inputs: Sequence[Any]) -> dict[str, bool | int]:
    """Inductor's settings for kernels that round where eager's do, if `rounds`.

    A rounding counts as two operations, and Inductor writes to memory what takes more than 30 of them on a GPU. A third
    more, and it writes the values that it writes without roundings; else a selective scan's step moves 1.2 times
    the bytes. On CPUs the limit is 50 from 2.13 on.
    """
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs)
    return {"emulate_precision_casts": rounds, **({"realize_opcount_threshold": 40} if rounds and on_gpu else {})}


def aot_eager(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], on_joint_graph: OnJointGraph, cutter: Cutter
) -> Callable[..., Any]:
    """Compile with AOTAutograd and eager kernels, as `aot_eager` does; passes run on the joint or inference graph."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def partition(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        on_joint_graph(joint)
        return cutter(joint, *args, **kwargs)

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


def inputs_of_dynamo(gm: torch.fx.GraphModule) -> dict[int, torch.fx.Node]:
    """Return the inputs of a graph after differentiation that are Dynamo's, by index there; of DTensors the parts."""
    sources = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        source = node.meta.get("desc")
        if isinstance(source, SubclassGetAttrAOTInput) and source.attr == "_local_tensor":
            source = source.base
        if isinstance(source, PlainAOTInput):
            sources[source.idx] = node
    return sources


def forget_output_values(gm: torch.fx.GraphModule) -> None:
    """Drop the fake values of the outputs of nested compile regions, bodies of bodies included.

    `invoke_subgraph` reads from them whether an output requires grad, but captured fakes are detached. Without values
    it runs the body to find out.
    """
    for node in gm.graph.find_nodes(op="get_attr"):
        body = getattr(gm, str(node.target), None)
        if isinstance(body, torch.fx.GraphModule):
            forget_output_values(body)
            if any(user.target is torch.ops.higher_order.invoke_subgraph for user in node.users):
                for returned in body.graph.output_node().all_input_nodes:
                    returned.meta.pop("val", None)


def lower_like(op: Any, other: Any) -> None:
    """Make Inductor's code for `op` that of `other`."""
    from torch._inductor.lowering import lowerings

    patches.add_lowering(op, lowerings[other])


def lower_as_call(op: Any, called: Any, arguments: Callable[..., tuple[Any, ...]], on_rows: bool = False) -> None:
    """Make Inductor's code call `called(*arguments(...))` for `op`, bypassing the dispatcher and Python.

    `on_rows`: the first operand is handed over as a matrix, a view of its rows. ATen views it, and the result, in each
    call, which takes 4 us.
    """
    from torch._inductor.lowering import fallback_handler, view
    from torch._inductor.utils import sympy_product

    call = fallback_handler(called, add_to_fallback_set=False)

    def lower(x: Any, *rest: Any) -> Any:
        if not on_rows:
            return call(*arguments(x, *rest))
        *rows, columns = x.get_size()
        product = call(*arguments(view(x, [sympy_product(rows), columns]), *rest))
        return view(product, [*rows, product.get_size()[-1]])

    patches.add_lowering(op, lower)


def channels_last(x: Any) -> Any:
    """Lay out a 4-D tensor of Inductor's channels-last, in dimensions of size 1 too: ATen looks at their strides."""
    from torch._inductor.ir import ExternKernel
    from torch._prims_common import make_channels_last_strides_for

    return ExternKernel.require_exact_strides(x, make_channels_last_strides_for(x.get_size()))
