"""Bindings as compiled graphs have them, of graphs that read one copy of each input."""

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompile.kernels.fp8 import quantize_many_reference_
from ampcompile.kernels.packed_conv import Blocks
from ampcompile.weights import Binding, CopySpec, Form, WritableCopies, weight_stats, writable_copies
from ampcompile.weights.step import QUANTIZED
from ampcompile.weights.store import store
from tests.weights.writers import unsampled


def bind(
    dtypes: Sequence[torch.dtype],
    in_place: bool = False,
    packed: Sequence[Blocks | None] | None = None,
    on_trial: Sequence[bool] | None = None,
    wide: Sequence[bool] | None = None,
) -> Binding:
    """Return the binding of a graph that reads a copy in `dtypes[i]` of its input i."""
    no_slots = [False] * len(dtypes)
    columns = zip(dtypes, wide or no_slots, packed or [None] * len(dtypes), on_trial or no_slots, strict=True)
    specs = [CopySpec(i, Form(dtype, w), blocks, trial) for i, (dtype, w, blocks, trial) in enumerate(columns)]
    return Binding(specs, in_place)


def copies_of(weight: torch.Tensor) -> list[torch.Tensor]:
    """The buffers of a weight's copies."""
    return [
        tensor
        for key, copy in store.copies.items()
        if key[1] == weight.data_ptr() and (tensor := copy.tensor) is not None
    ]


def lent_buffers(lent: WritableCopies, index: int) -> dict[Form, Tensor]:
    """The buffers that a step may write of the weight with that index."""
    forms: dict[Form, Tensor] = {form: buffer for form, buffer, weight in lent._others if weight is lent._params[index]}
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


def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list that grows by an item with each call that isn't answered by a look alone: True if a weight was cast."""
    found: list[bool] = []

    def cast_and_read(self: Binding, *args: Any) -> Any:
        passes = weight_stats().casts
        result = original(self, *args)
        found.append(weight_stats().casts > passes)
        return result

    original = Binding._cast_and_read
    monkeypatch.setattr(Binding, "_cast_and_read", cast_and_read)
    return found


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
        self.binding: Binding = bind([torch.bfloat16] * 2)
        self.kept: list[Any] = []
        self.right()

    def right(self) -> bool:
        weights = [self.weight, self.frozen]
        read = self.binding.copies(weights)
        return all(torch.equal(c, w.detach().bfloat16()) for c, w in zip(read, weights, strict=True))

    def one(self, tensor: Tensor) -> None:
        with torch.no_grad():
            tensor[unsampled(tensor)] += 1
