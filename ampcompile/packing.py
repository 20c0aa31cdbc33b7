"""Packed forms of weight copies, made once per update and shared by all graphs that read them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .kernels.packed_linear import pack

_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": lambda copy: copy,
    "packed": lambda copy: pack(copy.contiguous()),
    "packed_t": lambda copy: pack(copy.t().contiguous()),
}
_forms: Any = WeakTensorKeyDictionary()  # copy -> (its version, {layout: packed form})
_lock = threading.Lock()


def form(copy: Tensor, layout: str) -> Tensor:
    """`copy` in a layout of `passes.weight_copy.Slot`. A copy that changed gets new forms: old ones are never
    written, so a backward still waiting for one keeps the weights of its own forward."""
    with _lock, torch.inference_mode(False), torch.no_grad():
        version, forms = _forms.get(copy, (None, None))
        if version != copy._version:
            forms = {}
            _forms[copy] = (copy._version, forms)
        if layout not in forms:
            forms[layout] = _LAYOUTS[layout](copy)
        return forms[layout]


def reader(indices: Sequence[int], layouts: Sequence[str]) -> Callable[[list[Tensor]], list[Tensor]]:
    """A function from a graph's copies to the forms it reads: form i is copy `indices[i]` in `layouts[i]`.

    A `weights.Binding` returns the same list for as long as nothing in it changed, so that is all the hot path
    looks at. The list is kept, not the copies: a reference to a copy would look like a pending backward.
    """
    if set(layouts) <= {"strided"}:
        return lambda copies: [copies[i] for i in indices]
    last: tuple[list[Tensor], list[Tensor]] = ([], [])

    def read(copies: list[Tensor]) -> list[Tensor]:
        nonlocal last
        known, forms = last  # one tuple, replaced whole: threads see one state or the other
        if known is not copies:
            forms = [form(copies[i], layout) for i, layout in zip(indices, layouts, strict=True)]
            last = (copies, forms)
        return forms

    return read
