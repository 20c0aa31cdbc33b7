"""Count the costs of one graph on the GPU: launches, library calls, bytes, floating operations, memory."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import UserDefinedTritonKernel
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode
from torch._inductor.utils import get_dtype_size
from torch.fx import GraphModule, Node, map_arg
from torch.utils.flop_counter import flop_registry

from ampcompile.passes.analysis.aliasing import memory_of
from benchmarks.paper.traffic import traffic

LAUNCH = re.compile(r"^ +((?:triton|amp)\w*)\.run\(", re.MULTILINE)
LIBRARY = re.compile(r"extern_kernels\.(\w+)\(|= torch\.ops\.([\w.]+)\(|\b(aten\.[\w.]+)\(")
KERNEL = re.compile(
    r"^(\w+) = async_compile\.triton\('\w+', '''\n(.*?)''', device_str='cuda'\)", re.MULTILINE | re.DOTALL
)
REUSED = re.compile(r"(\w+) = .*; del (\w+)  # reuse")
MADE = re.compile(r"(\w+) = (?:empty_strided_\w+\(|extern_kernels\.|torch\.ops\.|aten\.|\w+\[\d+\]$)")
FREED = re.compile(r"del ([\w, ]+)")


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
    """Bytes saved for backward, without inputs, copies of weights and views of them; of values that share memory once.
    """
    peak: int
    """Most bytes alive at once as the code allocates and frees them, without inputs that stay alive."""
    kernels: dict[str, str] = field(repr=False)
    """Triton code by name."""


def count(kind: str, gm: GraphModule, graph: GraphLowering, code: str, held: set[str]) -> Counts:
    """Count a graph that Inductor has lowered. `held`: names of inputs that are alive before and after it."""
    given = {name: (storage, size) for name, storage, size in _given(gm) if name not in held}
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
        saved=sum(dict(at for name, at in given.items() if not name.startswith("tangents")).values()),
        peak=find_peak(code, given, _sizes(graph)),
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


def inputs_held(gm: GraphModule) -> set[str]:
    """The names of a forward graph's inputs, and of views of them, which it may keep for backward."""
    return {node.name for node in gm.graph.nodes if memory_of(node)[-1].op in ("placeholder", "get_attr")}


def _sizes(graph: GraphLowering) -> dict[str, int]:
    """The bytes of the buffers that are tensors."""
    buffers = {name: buffer for name, buffer in graph.name_to_buffer.items() if buffer.maybe_get_dtype() is not None}
    hint = graph.sizevars.optimization_hint
    return {
        name: hint(graph.get_allocation_storage_size(buffer), fallback=0) * get_dtype_size(buffer.get_dtype())
        for name, buffer in buffers.items()
    }


def find_peak(code: str, given: Mapping[str, tuple[int, int]], sizes: Mapping[str, int]) -> int:
    """Most bytes alive at once in a wrapper's code, line by line. `given`: memory and bytes of inputs that it frees."""
    memories: dict[str, Any] = {name: at for name, (at, _) in given.items()}
    alive: dict[Any, int] = dict(given.values())
    most = sum(alive.values())
    for line in map(str.strip, code.splitlines()):
        if reused := REUSED.match(line):
            memories[reused[1]] = memories.pop(reused[2], None)
        elif made := MADE.match(line):
            memories[made[1]], alive[made[1]] = made[1], sizes.get(made[1], 0)
            most = max(most, sum(alive.values()))
        elif freed := FREED.match(line):
            ended = {memories.pop(name, None) for name in freed[1].split(", ")}
            for memory in ended - set(memories.values()):
                alive.pop(memory, None)
    return most
