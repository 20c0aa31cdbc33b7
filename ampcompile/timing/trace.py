"""Times and memory of a step, from the events of torch's profiler, sorted into what they are spent on."""

import gc
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

from ampcompile.optim import states
from ampcompile.optim.masters import masters_of
from ampcompile.torch_private import marks, pytree, storages

from . import time_call

PRODUCTS, CASTS, STEP, REST = "products", "casts", "step", "rest"
KINDS = (PRODUCTS, CASTS, STEP, REST)
_SPANS = {
    STEP: re.compile(r"Optimizer\.|amp: (?!refresh)|## optimizer"),
    CASTS: re.compile(r"amp: refresh|aten::_to_copy$"),
    PRODUCTS: re.compile(r"(aten|mkldnn|mkl|ampcompile)::\w*(mm_?$|mv_?$|linear|matmul|conv(?!ert)|attention)"),
}
"""The names of spans of the host, ops among them; those of a kind's annotations stand on the GPU's line too."""
_KERNELS = {
    STEP: re.compile(r"amp_(adam|sgd|check_grads|unscale|update_scale)|multi_tensor_apply|FusedAdam"),
    CASTS: re.compile(
        r"amp_cast|b?float16_copy_kernel|direct_copy_kernel|triton_\w+_fused_*(_?(to_copy|clone|t|view|transpose|permute)_)+\d+"
    ),
    PRODUCTS: re.compile(
        r"(?!triton_(poi|red|per|for)_).*(gemm|gemv|cutlass|nvjet|xmma|conv|cudnn|flash|fmha|attention|triton_(tem|mm|bmm)"
        r"|splitK|wgrad|dgrad|winograd)",
        re.IGNORECASE,
    ),
}
"""The names of kernels: ours, torch's, Inductor's, those of NVIDIA's libraries."""


@dataclass(frozen=True)
class Trace:
    """Times of one step; seconds."""

    seconds: dict[str, float]
    """By kind, `KINDS`: on a GPU the kernels', else the host's"""
    busy: float = 0.0
    """While at least one kernel runs on the GPU; 0 without one"""
    launches: float = 0.0
    """Kernels and copies that the GPU runs"""

    @property
    def total(self) -> float:
        """Of all kinds together."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Memory:
    """Bytes where a step needs most of them, on its device."""

    phase: str
    """Which has the peak: "forward", "backward" or "step" """
    held: dict[str, int]
    """What is there between steps, by kind: "weights", "gradients", "states", "copies"; on a GPU "others" too, such as
    the pool of a captured step"""
    made: int
    """Of what the step itself made, and has at the peak"""
    kept: int
    """Of what forward made, and is there when backward begins"""
    less: dict[str, int] = field(default_factory=dict)
    """Bytes that options take off the peak, counted without running them; of `saved="fp8"` at most so many"""

    @property
    def total(self) -> int:
        """At the peak."""
        return self.made + sum(self.held.values())


def record_memory(call: Callable[[], object]) -> Memory:
    """Run a step under torch's profiler, and see what memory it takes beside what is held before."""
    held = _find_held()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profile:
        call()
    events = list(marks.memory_events(profile))
    on_gpu = any(of_gpu for *_, of_gpu in events)
    device = "cuda" if on_gpu else "cpu"
    memory = find_peak(events, held[device], on_gpu)
    return replace(memory, less=_count_less(memory, device))


def _count_less(memory: Memory, device: str) -> dict[str, int]:
    """Bytes that each option takes off a peak, the most first."""
    in_step, copies, less = memory.phase == "step", memory.held["copies"], Counter[str]()
    for optimizer in _find(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        coder = states.States("8bit", 0, partial(masters_of, optimizer), {})
        for group in getattr(optimizer, "param_groups", ()):
            for param in group["params"]:
                if type(param) is not nn.Parameter or param.device.type != device:
                    continue
                state = optimizer.state.get(param, {})
                wide = sum(state[name].nbytes for name in states.ALL_MOMENTS if isinstance(state.get(name), Tensor))
                if wide and not group.get("amsgrad") and coder.codes(param, group):
                    less['states="8bit"'] += wide - coder.bytes_of(param, group)
                if param.dtype == torch.float32:  # 3 bytes for 4, and for its gradient 2
                    halved = param.nbytes // 2 if in_step or param.grad is not None else 0
                    less['masters="remainder8"'] += param.nbytes // 4 + halved
    less['masters="remainder8"'] += copies if less['masters="remainder8"'] else 0
    less['weights="every_call"'] = copies if in_step else 0  # backward keeps those of its own call
    less['saved="fp8"'] = 0 if in_step else memory.kept // 2
    return {name: size for name, size in less.most_common() if size > 0}


def _find_held() -> dict[str, dict[str, int]]:
    """Bytes of what the process holds on each type of device, by kind."""
    from ampcompile.weights import weight_stats

    params = _find(nn.Parameter)
    of_optimizers = [[*getattr(holder, "state", {}).values()] for holder in _find(torch.optim.Optimizer)]
    gradients = [param.grad for param in params if param.is_leaf]
    kinds = {"weights": params, "gradients": gradients, "states": of_optimizers}
    held = {}
    for device in ("cpu", "cuda"):
        of_device = {kind: _count_bytes(pytree.tree_leaves(values), device) for kind, values in kinds.items()}
        held[device] = of_device | {"copies": weight_stats().bytes}
    if torch.cuda.is_available():
        held["cuda"]["others"] = max(0, torch.cuda.memory_allocated() - sum(held["cuda"].values()))
    return held


def _find(*kinds: type) -> list[Any]:
    """What the process holds of some classes."""
    return [holder for holder in gc.get_objects() if issubclass(type(holder), kinds)]


def _count_bytes(values: Iterable[Any], device: str) -> int:
    """Of plain tensors' memory, and this rank's of DTensors."""
    tensors = [tensor for tensor in map(storages.local_part, values) if type(tensor) in (Tensor, nn.Parameter)]
    strided = (tensor for tensor in tensors if tensor.device.type == device and tensor.layout is torch.strided)
    return sum({storages.storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in strided}.values())


def find_peak(events: Iterable[tuple[int, str, int, bool]], held: dict[str, int], on_gpu: bool) -> Memory:
    """Add up what comes and goes; see `marks.memory_events`. What follows backward and isn't the step counts as it."""
    spans, changes = list[tuple[str, int, int]](), list[tuple[int, int]]()
    for start, name, size, of_gpu in events:
        if not name and of_gpu == on_gpu:
            changes.append((start, size))
        elif name.startswith("Optimizer.step#"):
            spans.append(("step", start, start + size))
        elif name.startswith("autograd::engine::evaluate_function"):
            spans.append(("backward", start, start + size))
    begin = min((start for phase, start, _ in spans if phase == "backward"), default=0)
    end = max((last for phase, _, last in spans if phase == "backward"), default=0)
    live = most = at = kept = 0
    for when, size in sorted(changes, key=lambda change: change[0]):
        live += size
        if when < begin:
            kept = live
        if live > most:
            most, at = live, when
    after = "step" if begin and at > end else "forward"
    phase = next((phase for phase, first, last in sorted(spans, key=lambda s: -s[1]) if first <= at <= last), after)
    return Memory(phase, held, most, kept)


def record(call: Callable[[], object], calls: int = 3) -> Trace:
    """Run a step some times under torch's profiler; returns the mean of one."""
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        elapsed = calls * time_call("cuda" if cuda else "cpu", call, calls)
    return sort_events(profile.events(), elapsed, calls)


def sort_events(events: Iterable[Any], elapsed: float, calls: int = 1) -> Trace:
    """Add up the times of events, a GPU's if there are some, else the host's of the `elapsed` seconds; for one call.

    Annotations, which stand on the GPU's line beside the kernels in them, count there only as what their kernels are.
    """
    host, gpu = list[Any](), list[Any]()
    for event in events:
        (gpu if event.device_type == torch.autograd.DeviceType.CUDA else host).append(event)
    if not gpu:
        times = dict.fromkeys(KINDS, 0.0)
        for kind, start, end in _outermost(host):
            times[kind] += (end - start) / 1e6
        times[REST] = max(0.0, elapsed - sum(times.values()))
        return Trace({kind: times[kind] / calls for kind in KINDS})
    named = {event.name for event in host}
    kernels = [event for event in gpu if event.name not in named and not getattr(event, "is_user_annotation", False)]
    times, spans = dict.fromkeys(KINDS, 0.0), list(_outermost(gpu))
    for event in kernels:
        start, end = _times_of(event)
        around = (kind for kind, first, last in spans if first <= start < last)
        times[next(around, None) or _kind_of(event.name, _KERNELS) or REST] += (end - start) / 1e6
    busy = until = 0.0
    for start, end in sorted(map(_times_of, kernels)):  # several may run at once
        busy, until = busy + max(0.0, end - max(start, until)), max(until, end)
    return Trace({kind: times[kind] / calls for kind in KINDS}, busy / 1e6 / calls, len(kernels) / calls)


def _times_of(event: Any) -> tuple[float, float]:
    return event.time_range.start, event.time_range.end


def _kind_of(name: str, patterns: dict[str, re.Pattern[str]]) -> str | None:
    return next((kind for kind, pattern in patterns.items() if pattern.match(name)), None)


def _outermost(events: Iterable[Any]) -> Iterator[tuple[str, float, float]]:
    """Yield kind, start and end of each span of a kind that is in no other one, thread by thread."""
    until: dict[Any, float] = {}
    for event in sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end)):
        start, end = _times_of(event)
        if start >= until.get(event.thread, start) and (kind := _kind_of(event.name, _SPANS)):
            until[event.thread] = end
            yield kind, start, end
