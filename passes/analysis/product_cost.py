"""Estimate if low precision pays: the time of a graph's products in both types, by measurements on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg

from ampcompile.dtypes import LOW, short_name
from ampcompile.kernels import packed_linear
from ampcompile.passes.graph import Decision, decision_of, device_type_of, to_dtype
from ampcompile.torch_private import pytree, tracing
from ampcompile.torch_private.types import OpOverload

from .op_traits import is_elementwise
from .schema import writes
from .sizes import elements_hint, is_float_tensor
from .wide_products import Flops, is_emulated, runs_in_float32

ENOUGH = 1.05  # times as fast: less is noise
CALL = 50e-6  # seconds, roughly, that the host spends in any compiled call: a faster graph gets no advice
# Host time that our backend adds to a call, and to the first call after an update of weights with kept copies:
# see "Growth", "What freshness costs" and "Small models" in docs/benchmarks.md.
CALL_OURS, CALL_WEIGHT = 10e-6, 0.3e-6  # seconds: each call, and for each copy
UPDATE, UPDATE_WEIGHT = 15e-6, 0.5e-6  # seconds: each update, and each small weight; a large one takes its cast's time
# Widths of square products, and numbers that are cast. Up to a width of 16 torch doesn't pass 16-bit products to
# oneDNN, which takes 6 times as long to start one.
_SMALL, _LARGE, _COPIED = 32, 512, 1 << 22
_PATIENCE = 0.2  # seconds for one measurement


@dataclass(frozen=True)
class Speed:
    """The cost of a product in one dtype: seconds to start it, floating operations per second."""

    start: float
    flops: float

    def seconds(self, flops: float) -> float:
        """The time of one product of so many floating operations."""
        return self.start + flops / self.flops


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of one forward of a graph: its products, its casts, and the host time that we add."""

    device: str
    low: torch.dtype
    products: int
    wide: float
    """Its products in float32."""
    narrow: float
    """Its products in the low type."""
    casts: float
    """Its casts, without those of weights whose copies are kept. Casts inside a fused kernel are free."""
    emulated: bool = False
    """True if the device has no units for the low type, so that its products run in float32 (`products="auto"`)."""
    copies: int = 0
    """Weights whose low copies are kept."""
    update: float = 0.0
    """Casting these weights again after an update; 0 if they aren't trained."""
    backward: tuple[float, float] = (0.0, 0.0)
    """Backward's products in float32; and in the low type with their casts, those of weights' gradients included."""

    @property
    def call(self) -> float:
        """Host time that our backend adds to each call."""
        return CALL_OURS + self.copies * CALL_WEIGHT

    @property
    def whole(self) -> tuple[float, float]:
        """A training step, or a call of an untrained graph: in float32, and in the low type with all extra costs."""
        narrow = self.narrow + self.casts + self.backward[1] + self.call + self.update
        return self.wide + self.backward[0], narrow

    @property
    def gain(self) -> float:
        """The speedup over float32; 1 without products."""
        wide, narrow = self.whole
        return wide / narrow if self.products else 1.0

    @property
    def pays(self) -> bool:
        return not self.products or self.gain >= ENOUGH

    @property
    def matters(self) -> bool:
        """True if the work in either type takes at least as long as a compiled call itself."""
        return self.products > 0 and max(self.wide, self.narrow + self.casts) >= CALL

    def __str__(self) -> str:
        low, count = short_name(self.low), f"{self.products} product{'s' * (self.products != 1)}"
        wide, narrow, casts = (f"{1e6 * seconds:.0f} us" for seconds in (self.wide, self.narrow, self.casts))
        verdict, end = "pays" if self.pays else "won't help here", ""
        if not self.matters:
            verdict = "or f32 makes no difference here" if self.pays else "gains nothing here"
            end = ", less than a call itself takes"
        if self.backward[0]:
            end += "; in backward {:.0f} us and {:.0f} us".format(*(1e6 * each for each in self.backward))
        end += f"; besides, {1e6 * self.call:.0f} us a call"
        end += f" and {1e6 * self.update:.0f} us an update of {self.copies} weights" * bool(self.update)
        longer = self.whole[1] - self.whole[0]
        if not self.pays and longer > 0:
            end += f": {'a step' if self.backward[0] else 'a call'} takes some {1e6 * longer:.0f} us longer"
        how = f", which has no units for {low} and multiplies in f32" if self.emulated else ""
        times = f"{count} on this {self.device}{how}: {wide} in f32, {narrow} in {low} and {casts} for casts{end}"
        return f"{low} {verdict} (estimated): {times}"


@cache
def speed(device_type: str, dtype: torch.dtype) -> Speed:
    """Measure products, once per process, in some 10 ms; those of emulated types as `WidenProducts` runs them."""
    emulated = is_emulated(device_type, dtype)
    seconds = []
    for width, rounds in ((_SMALL, 30), (_LARGE, 5)):
        with tracing.on_real_tensors():
            matrix = torch.ones(width, width, device=device_type, dtype=torch.float32 if emulated else dtype)
            multiply = partial(torch.mm, matrix, matrix)
            if emulated and width == _LARGE and packed_linear.available(torch.float32):
                multiply = partial(packed_linear.packed_linear, matrix, matrix, matrix, None)
            seconds.append(_fastest(device_type, multiply, rounds))
    start, whole = seconds
    return Speed(start, 2 * _LARGE**3 / max(whole - start, 1e-9))


@cache
def bandwidth(device_type: str) -> float:
    """Bytes that a cast reads and writes per second, measured once per process."""
    with tracing.on_real_tensors():
        numbers = torch.ones(_COPIED, device=device_type)
        return _COPIED * 6 / _fastest(device_type, lambda: numbers.to(torch.bfloat16), 5)


def smallest_gaining_width(device_type: str, low: torch.dtype) -> int | None:
    """The width, a power of two, of the smallest square product that is faster in a low type; None if none is."""
    wide, narrow = speed(device_type, torch.float32), speed(device_type, low)
    widths = (2**n for n in range(4, 15))
    return next((n for n in widths if wide.seconds(2 * n**3) > ENOUGH * narrow.seconds(2 * n**3)), None)


def time_call(device_type: str, call: Callable[[], Any]) -> float:
    """Seconds of one call, until the device has finished it."""
    wait = torch.accelerator.synchronize if device_type != "cpu" else lambda: None
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def _fastest(device_type: str, call: Callable[[], Any], rounds: int) -> float:
    """Seconds of the fastest of some calls: where others use the machine, most calls of microseconds wait for them."""
    times: list[float] = []
    while len(times) <= rounds and sum(times) < _PATIENCE:
        times.append(time_call(device_type, call))
    return min(times)


def estimate(gm: GraphModule, kept: Set[Node]) -> Estimate | None:
    """Estimate a graph whose precision is decided; None if no op is low, or if this machine lacks its device.

    `kept`: weights whose low copies are kept between calls. Bodies of higher-order ops are not counted.
    """
    decided: dict[Node, Decision] = {node: decision_of(node) for node in gm.graph.nodes}
    casts = {(n, to) for d in decided.values() for n, to in d.operands.items() if n not in kept}
    lows = [to for d in decided.values() for to in d.operands.values() if to in LOW]
    if not lows:
        return None
    low, device = lows[0], device_type_of([decision.result for decision in decided.values()]) or "cpu"
    if device != "cpu" and not _is_present(device):
        return None
    products, wide, narrow, backward = 0, 0.0, 0.0, [0.0, 0.0]
    differentiated = _differentiated(gm)
    with tracing.on_fakes_of(gm), torch.no_grad(), Flops() as counted:
        for node, decision in decided.items():
            if not _may_multiply(node, decision):
                continue
            counted.total = 0
            _run(node, decision)
            if counted.total:
                products += 1
                numbers = sum(elements_hint(decision_of(n).result) or 0 for n in (node, *node.all_input_nodes))
                seconds = [_seconds(device, dtype, counted.total, numbers) for dtype in (torch.float32, low)]
                wide, narrow = wide + seconds[0], narrow + seconds[1]
                matrices = [n for n in node.all_input_nodes if n in differentiated and decision_of(n).result.dim() > 1]
                backward = [total + len(matrices) * each for total, each in zip(backward, seconds, strict=True)]
    moved = sum(_cast_seconds(device, decided[n]) for n, _ in casts)
    copies = {n for d in decided.values() for n, to in d.operands.items() if n in kept and to in LOW}
    trained = [_cast_seconds(device, decided[n]) for n in copies & differentiated]
    update = UPDATE * bool(trained) + sum(max(UPDATE_WEIGHT, cast) for cast in trained)
    repeated_casts = sum(trained) + moved if differentiated else 0.0
    return Estimate(
        device,
        low,
        products,
        wide,
        narrow,
        moved,
        is_emulated(device, low),
        len(copies),
        update,
        (backward[0], backward[1] + repeated_casts),
    )


def _differentiated(gm: GraphModule) -> set[Node]:
    """The values that need a gradient if the graph is called as it was traced."""
    differentiated: set[Node] = set()
    for node in gm.graph.nodes if torch.is_grad_enabled() else ():
        asked = node.op == "placeholder" and getattr(node.meta.get("example_value"), "requires_grad", False)
        if asked or not differentiated.isdisjoint(node.all_input_nodes):
            differentiated.add(node)
    return differentiated


def _cast_seconds(device_type: str, decision: Decision) -> float:
    return 6 * (elements_hint(decision.result) or 0) / bandwidth(device_type)


def _is_present(device_type: str) -> bool:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator is not None and accelerator.type == device_type


def _seconds(device_type: str, dtype: torch.dtype, flops: float, numbers: int) -> float:
    """A product's time: that of its arithmetic or, on accelerators, of reading and writing its numbers if longer.

    A CPU's products of a few rows were measured to be no faster on half the bytes, and some run in float32.
    """
    run = torch.float32 if device_type == "cpu" and runs_in_float32(dtype, int(flops) // 2, numbers) else dtype
    arithmetic = speed(device_type, run).seconds(flops)
    return arithmetic if device_type == "cpu" else max(arithmetic, numbers * dtype.itemsize / bandwidth(device_type))


def _may_multiply(node: Node, decision: Decision) -> bool:
    if not isinstance(node.target, OpOverload) or node.target.is_view or is_elementwise(node.target):
        return False
    results = [value for value in pytree.tree_leaves(decision.result) if is_float_tensor(value)]
    return any(value.dtype in LOW for value in results) and not writes(node.target)


def _run(node: Node, decision: Decision) -> None:
    def value(operand: Node) -> Any:
        return to_dtype(decision_of(operand).result, decision.operands.get(operand))

    args, kwargs = map_arg((node.args, node.kwargs), value)
    node.target(*args, **kwargs)
