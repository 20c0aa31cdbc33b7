"""The copies that a step writes together with the weights: all that the scaler asks of the room of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampcompile.weights import Form, writable_copies
from ampcompile.weights.copies import cast_into
from ampcompile.weights.store import store

QUANTIZED = Form(torch.float8_e4m3fn)


class CopiesOfStep:
    """The copies of these parameters, all on one device, that a step may write; they count as stale until `wrote`."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.by_kernel: dict[int, Tensor] = {}
        """Of float32 parameters the first 16-bit copy, which kernels write with the weight; by the parameter's index"""
        self.quantized: dict[int, tuple[Tensor, Tensor]] = {}
        """Quantized ones that the kernels write too, with the parameters, by their indices"""
        self._writable = writable_copies(params)
        self._others: list[tuple[Form, Tensor, Tensor]] = []
        for i, buffers in self._writable.buffers.items():
            for form, buffer in buffers.items():
                if form == QUANTIZED and params[i].is_contiguous():
                    self.quantized[i] = buffer, params[i]
                elif params[i].dtype == torch.float32 and not form.quantized and i not in self.by_kernel:
                    self.by_kernel[i] = buffer
                else:
                    self._others.append((form, buffer, params[i]))

    def wrote(self) -> None:
        """Mark the copies as fresh; call it when kernels have written, and versions of weights were raised."""
        quantized = [buffer for buffer, _ in self.quantized.values()]
        torch.autograd.graph.increment_version([*self.by_kernel.values(), *quantized])
        cast_into(self._others)
        self._writable.mark_written()


def there_are_copies() -> bool:
    """Return True if any weight has a copy; else a step has nothing to ask."""
    return bool(store.keys)
