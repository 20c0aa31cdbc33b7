"""Count the costs of one graph on the GPU: launches, library calls, bytes, floating operations, memory."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._inductor import memory
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import UserDefinedTritonKernel
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode
from torch.fx import GraphModule, Node, map_arg
from torch.utils._ordered_set import OrderedSet
from torch.utils.flop_counter import flop_registry

from benchmarks.paper.traffic import traffic

LAUNCH = re.compile(r"^ +((?:triton|amp)\w*)\.run\(", re.MULTILINE)
LIBRARY = re.compile(r"extern_kernels\.(\w+)\(|= torch\.ops\.([\w.]+)\(|\b(aten\.[\w.]+)\(")
KERNEL = re.compile(
    r"^(\w+) = async_compile\.triton\('\w+', '''\n(.*?)''', device_str='cuda'\)", re.MULTILINE | re.DOTALL
)
ROUNDED = re.compile(r"\.to\(tl\.(?:bfloat16|float16)\)")


@dataclass
class Counts:
    """Counts of one graph."""

    kind: str
    """"forward", "backward" or "inference"."""
    launches: int
    """Launches of Triton kernels, ours included."""
    calls: dict[str, int]
    """Calls of libraries' kernels, by name."""
    bytes: int
    parts: list[tuple[str, int]]
    """For each kernel its operations, and the bytes that it reads and writes."""
    flops: int
    """Floating operations of products, convolutions and attention; a multiplication and its addition are two."""
    saved: int
    """Bytes saved for backward, without inputs and their views; of values that share memory once."""
    peak: int
    """Most bytes alive at once, without inputs that stay alive."""
    roundings: int
    """Places in Triton code, apart from stores, that round to 16 bits."""
    kernels: dict[str, str] = field(repr=False)
    """Triton code by name."""


def count(kind: str, gm: GraphModule, graph: GraphLowering, code: str, held: set[int]) -> Counts:
    """Count a graph that Inductor has lowered; adds the memory of the inputs of a forward graph to `held`."""
    if kind != "backward":
        held.update(storage for _, storage, _ in _given(gm))
    parts = [(_label(node), size) for node in graph.scheduler.nodes if (size := traffic(node))]
    kernels = dict(KERNEL.findall(code))
    calls = Counter(next(filter(None, groups)) for groups in LIBRARY.findall(code))
    return Counts(
        kind,
        launches=len(LAUNCH.findall(code)),
        calls=dict(calls),
        bytes=sum(size for _, size in parts),
        parts=parts,
        flops=sum(map(_flops, gm.graph.nodes)),
        saved=sum({at: size for name, at, size in _given(gm) if _is_saved(name, at, held)}.values())
        if kind == "backward"
        else 0,
        peak=_peak(graph),
        roundings=sum(len(ROUNDED.findall(kernel)) for kernel in kernels.values()),
        kernels=kernels,
    )


def _label(node: BaseSchedulerNode) -> str:
    if isinstance(node, ExternKernelSchedulerNode):
        called: Any = node.node
        if isinstance(called, UserDefinedTritonKernel):
            kernel: Any = called.get_kernel_and_metadata()[0]
            return kernel.__name__
        name = getattr(called, "python_kernel_name", None) or getattr(called, "op_overload", None)
        return str(name or type(called).__name__).removeprefix("torch.ops.").removeprefix("extern_kernels.")
    origins = {origin for part in node.get_nodes() if part.node is not None for origin in part.node.get_origins()}
    names = {
        str(getattr(origin.target, "_opname", origin.target)) for origin in origins if origin.op == "call_function"
    }
    return " ".join(sorted(names - {"convert_element_type"}) or sorted(names))


def _flops(node: Node) -> int:
    rule = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if rule is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    return int(rule(*args, **kwargs, out_val=node.meta["val"]))


def _given(gm: GraphModule) -> Iterator[tuple[str, int, int]]:
    """Yield each input that is a tensor: its name, a number for its memory, and the bytes of that."""
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            yield node.name, storage._cdata, storage.nbytes()


def _is_saved(name: str, storage: int, held: set[int]) -> bool:
    """True for an input of backward that is neither an incoming gradient nor in the memory of an input of forward."""
    return storage not in held and not name.startswith(("primals", "tangents"))


def _peak(graph: GraphLowering) -> int:
    scheduler = graph.scheduler
    peak, _ = memory.prepare_planning_info(
        scheduler.nodes,
        scheduler.name_to_buf,
        scheduler.name_to_fused_node,
        OrderedSet(graph.graph_inputs),
        OrderedSet(graph.get_output_names()),
    )
    return peak
