"""Bindings as compiled graphs have them, of graphs that read one copy of each input."""

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ampcompile.kernels.fp8 import quantize_many_reference_
from ampcompile.kernels.packed_conv import Blocks
from ampcompile.weights import Binding, CopySpec, Form, WritableCopies, writable_copies
from ampcompile.weights.step import QUANTIZED
from ampcompile.weights.store import store
from tests.devices import profiled
from tests.weights.writers import unsampled


def bind(
    forms: Sequence[torch.dtype | Form],
    in_place: bool = False,
    packed: Sequence[Blocks | None] | None = None,
    on_trial: Sequence[bool] | None = None,
    wide: Sequence[bool] | None = None,
    kind: Any = Binding,
) -> Any:
    """What reads the copies of a graph that reads one in `forms[i]`, or of that dtype, of its input i.

    All tests get it here: only this file knows how it is made.
    """
    no_slots = [False] * len(forms)
    columns = zip(forms, wide or no_slots, packed or [None] * len(forms), on_trial or no_slots, strict=True)
    specs = [
        CopySpec(i, form if isinstance(form, Form) else Form(form, w), blocks, trial)
        for i, (form, w, blocks, trial) in enumerate(columns)
    ]
    return kind(specs, in_place)


def copies_of(weight: torch.Tensor) -> list[torch.Tensor]:
    """The buffers of a weight's copies."""
    return [
        tensor
        for key, copy in store.copies.items()
        if key[1] == weight.data_ptr() and (tensor := copy.tensor) is not None
    ]


def lent_buffers(lent: WritableCopies, index: int) -> dict[Form, Tensor]:
    """The buffers that a step may write of the weight with that index."""
    forms: dict[Form, Tensor] = {form: buffer for form, buffer, weight in lent.others if weight is lent.params[index]}
    for buffer, dtype in [lent.by_kernel[index]] if index in lent.by_kernel else []:
        forms[Form(dtype, wide=buffer.dtype != dtype)] = buffer
    for buffer, _ in [lent.quantized[index]] if index in lent.quantized else []:
        forms[QUANTIZED] = buffer
    return forms


def cast_into(buffer: Tensor, weight: Tensor, form: Form) -> Tensor:
    """What a copy must hold."""
    if form.quantized:
        quantize_many_reference_([buffer], [weight.detach()])
    else:
        buffer.copy_(weight.detach().to(form.dtype))
    return buffer


def take_step(params: Sequence[Tensor], write: Callable[[], object]) -> None:
    """As a fused step of ours writes weights, which it does unseen, and those of their copies that it takes."""
    lent = writable_copies(params)
    write()
    for i, param in enumerate(params):
        buffers = lent_buffers(lent, i)
        for form, buffer in buffers.items():
            cast_into(buffer if form.quantized else torch.from_dlpack(buffer), param, form)
        torch.autograd.graph.increment_version([param, *buffers.values()])
    lent.mark_written()


def comparisons(call: Callable[[], object]) -> int:
    """How often in a call copies were compared or cast, as a profile shows: a look alone is no region there."""
    with profiled(torch.profiler.ProfilerActivity.CPU) as names:
        call()
    return names.count("amp: refresh copies of weights")


def lines_of(call: Callable[[], object]) -> int:
    """How many lines of the package run in a call."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace if "ampcompile" in frame.f_globals.get("__name__", "") else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class Case:
    """A weight, a frozen one, and a graph that reads both."""

    def __init__(self) -> None:
        self.weight, self.frozen = nn.Parameter(torch.randn(40, 30)), torch.randn(40, 30)
        self.binding = bind([torch.bfloat16] * 2)
        self.kept: list[Any] = []
        self.right()

    def read(self) -> list[Tensor]:
        return self.binding.copies([self.weight, self.frozen])

    def right(self) -> bool:
        pairs = zip(self.read(), (self.weight, self.frozen), strict=True)
        return all(torch.equal(copy, weight.detach().bfloat16()) for copy, weight in pairs)

    def one(self, tensor: Tensor) -> None:
        with torch.no_grad():
            tensor[unsampled(tensor)].add_(1)  # which raises the version once
