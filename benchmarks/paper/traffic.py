"""Count the bytes that a kernel reads and writes, each address once, as if cached until its last use in the kernel.

In fused kernels Inductor's own count takes whole buffers, also for a slice, a gathered row, a broadcast bias. This
module counts the elements that an index covers and, for a library's kernel, its operands and results.
"""

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

from torch._inductor import ir
from torch._inductor.dependencies import Dep, MemoryDep
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode, FusedSchedulerNode
from torch._inductor.utils import get_dtype_size
from torch._inductor.virtualized import V


def traffic(node: BaseSchedulerNode) -> int:
    """Bytes that one kernel reads and writes."""
    if isinstance(node, ExternKernelSchedulerNode):
        return sum(_given(node.node)) + _returned(node)
    inside, outputs = _inside(node), {dep.name for dep in node.read_writes.writes}
    touched: dict[tuple[str, bool, bool], dict[Any, int]] = {}
    for written, passed_over, deps in (
        (False, inside | outputs, node.read_writes.reads),  # values that the kernel computes stay in registers
        (True, inside, node.read_writes.writes),
    ):
        for dep in deps:
            if dep.name not in passed_over and (dep.name in V.graph.name_to_buffer or dep.name in V.graph.graph_inputs):
                key, elements = _region(dep)
                touched.setdefault((dep.name, getattr(dep, "mode", None) == "atomic_add", written), {})[key] = elements
    return sum(
        _in_bytes(name, sum(regions.values())) * (2 if added else 1) for (name, added, _), regions in touched.items()
    )


def _inside(node: BaseSchedulerNode) -> set[str]:
    """Buffers that exist only in the kernel's registers."""
    parts = set(node.get_nodes()) if isinstance(node, FusedSchedulerNode) else set()
    buffers = node.scheduler.name_to_buf
    return {
        dep.name
        for dep in (node.read_writes.writes if parts else ())
        if not {user.node for user in buffers[dep.name].users} - parts
    }


def _region(dep: Dep) -> tuple[Any, int]:
    """A key for the addresses of an access, and their number of elements."""
    if not isinstance(dep, MemoryDep):
        return dep.name, _hint(V.graph.get_numel(dep.name))
    gathered = dep.is_indirect()
    sizes = dict(zip(dep.var_names, dep.size, strict=True))
    counted = sizes.values() if gathered else [size for name, size in sizes.items() if name in dep.index.free_symbols]
    return dep.normalize() if not gathered else dep, prod(map(_hint, counted))


def _in_bytes(name: str, elements: int) -> int:
    whole = _hint(V.graph.get_numel(name))
    return min(elements, whole) * get_dtype_size(V.graph.get_dtype(name))


def _given(kernel: Any) -> Iterator[int]:
    """Yield the bytes of each operand of a library's kernel."""
    if isinstance(kernel, ir.MultiOutput):
        return
    seen = set()
    for tensor in _tensors(kernel.inputs):
        layout = tensor.get_layout()
        place = tensor.get_name(), str(layout.offset), str(layout.size), str(layout.stride)
        if place not in seen:
            seen.add(place)
            elements = prod(_hint(size) for size, step in zip(layout.size, layout.stride, strict=True) if step != 0)
            yield elements * get_dtype_size(layout.dtype)


def _tensors(inputs: Iterable[Any]) -> Iterator[Any]:
    for each in inputs:
        if isinstance(each, list | tuple):
            yield from _tensors(each)
        elif hasattr(each, "get_layout") and not isinstance(each.get_layout(), ir.NoneLayout | ir.MultiOutputLayout):
            yield each


def _returned(node: ExternKernelSchedulerNode) -> int:
    """Bytes that a library's kernel writes: its result or results; operands that it changes count in `_given`."""
    kernel: Any = node.node
    if isinstance(kernel, ir.MultiOutput):
        return 0
    if isinstance(kernel.layout, ir.MultiOutputLayout):
        users = [getattr(user.node, "node", None) for user in node.scheduler.name_to_buf[kernel.get_name()].users]
        return sum(_bytes(user) for user in users if isinstance(user, ir.MultiOutput))
    if isinstance(kernel.layout, ir.NoneLayout):
        return 0  # counted as operands
    return _bytes(kernel)


def _bytes(buffer: Any) -> int:
    if isinstance(buffer.layout, ir.NoneLayout):
        return 0
    return prod(map(_hint, buffer.get_size())) * get_dtype_size(buffer.get_dtype())


def _hint(size: Any) -> int:
    return int(V.graph.sizevars.optimization_hint(size, fallback=0))
