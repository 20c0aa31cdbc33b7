"""Packed forms of weight copies, made once per update and shared by all graphs that read them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import is_
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


def reader(indices: Sequence[int], layouts: Sequence[str]) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """A function from a graph's copies to the forms it reads: form i is copy `indices[i]` in `layouts[i]`.

    The hot path compares identity and version of every copy with those of the last call.
    """
    if set(layouts) <= {"strided"}:
        return lambda copies: [copies[i] for i in indices]
    seen: tuple[list[Tensor], list[int], list[Tensor]] = ([], [], [])

    def read(copies: Sequence[Tensor]) -> list[Tensor]:
        nonlocal seen
        before, versions, forms = seen  # one tuple, replaced whole: threads see one state or the other
        now = [copy._version for copy in copies]
        if versions != now or not all(map(is_, before, copies)):
            forms = [form(copies[i], layout) for i, layout in zip(indices, layouts, strict=True)]
            seen = (list(copies), now, forms)
        return forms

    return read
