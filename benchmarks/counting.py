"""Counts of one call besides arithmetic: graphs, casts, kernel launches, waits of the host."""

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompile.dtypes import LOW

CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
PRODUCTS = re.compile(r"\b(add|b|badd)?b?mm\b|linear|convolution|packed_conv")
"""Operators that multiply matrices, torch's and ours, by name."""
LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch"}


@dataclass
class Casts:
    """Changes between floating dtypes, and the bytes they read and write were each a kernel of its own."""

    count: int = 0
    bytes: int = 0
    products: int = 0
    """Products of 16-bit numbers beside them, where a graph is compiled; those count that float32's kernels compute."""

    def see(self, before: Any, after: Any) -> None:
        """Count one operation if it is a cast."""
        if not (isinstance(before, Tensor) and isinstance(after, Tensor)) or before.dtype == after.dtype:
            return
        if before.is_floating_point() and after.is_floating_point():
            self.count += 1
            self.bytes += int(before.numel()) * (before.itemsize + after.itemsize)


@contextmanager
def casts_compiled() -> Iterator[Casts]:
    """Counts casts in the graphs, forward and backward, that Inductor lowers meanwhile, after all graph passes."""
    from torch._inductor import compile_fx

    casts, passes = Casts(), compile_fx._recursive_post_grad_passes

    def counting(gm: GraphModule, *args: Any, **kwargs: Any) -> None:
        passes(gm, *args, **kwargs)
        for node in gm.graph.nodes:
            if node.target in CASTS:
                casts.see(node.args[0].meta["val"], node.meta["val"])
            elif isinstance(node.target, torch._ops.OpOverload) and PRODUCTS.search(str(node.target)):
                casts.products += any(map(_is_rounded, node.all_input_nodes))

    with mock.patch.object(compile_fx, "_recursive_post_grad_passes", counting):
        yield casts


def _is_rounded(operand: Node) -> bool:
    """True if it holds 16-bit numbers, widened perhaps."""
    while isinstance(operand.target, torch._ops.OpOverload) and (operand.target.is_view or operand.target in CASTS):
        if _is_low(operand):
            return True
        operand = operand.all_input_nodes[0]
    return _is_low(operand)


def _is_low(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in LOW


@contextmanager
def nothing_from_caches() -> Iterator[None]:
    """Inductor lowers every graph meanwhile: what it takes from a cache can't be counted."""
    inductor, functorch = torch._inductor.config, torch._functorch.config
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield


class CastsRun(TorchDispatchMode):
    """Counts the casts that eager operations do meanwhile, in backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = Casts()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in CASTS:
            self.casts.see(args[0], result)
        return result


def graphs_compiled() -> int:
    """Graphs that Dynamo has compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@contextmanager
def profiled(*activities: torch.profiler.ProfilerActivity) -> Iterator[list[str]]:
    """Collects the names of what runs meanwhile; without what the profiler prints."""
    names: list[str] = []
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            yield names
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    names += [event.name for event in profile.events()]


def kernel_launches(call: Callable[[], object]) -> int:
    """Kernels and CUDA graphs that the host launches in one call."""
    with profiled(torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA) as names:
        call()
        torch.cuda.synchronize()
    return sum(name in LAUNCHES for name in names)


def device_seconds(call: Callable[[], object]) -> float:
    """Seconds that a call's kernels and copies take on the GPU, added up: what is left if the host is never late."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.device_time_total for event in on_device) / 1e6


def host_syncs(call: Callable[[], object], device: str) -> int:
    """How often one call waits for the device; on a CPU, how often it reads a tensor's value as a number."""
    if device == "cpu":
        with profiled(torch.profiler.ProfilerActivity.CPU) as names:
            call()
        return names.count("aten::_local_scalar_dense")
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
