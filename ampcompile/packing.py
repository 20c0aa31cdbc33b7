"""Packed forms of weight copies: made once they pay, shared by all graphs that read them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .kernels.packed_linear import pack

PAYS = 3
"""How often a copy is read before it is packed. Packing costs what it saves in as many calls: a weight that changes at
every call is never packed, and nobody pays more than twice what would have been best."""

_forms: Any = WeakTensorKeyDictionary()  # copy -> (its version, its packed form)
_lock = threading.Lock()


def packed_form(copy: Tensor, reads: int) -> Tensor | None:
    """`copy` packed, if someone has packed it already or `reads` are enough. A copy that changed gets a new form: old
    ones are never written, so whoever still computes with one keeps the weights that it began with."""
    with _lock, torch.inference_mode(False), torch.no_grad():
        version, form = _forms.get(copy, (None, None))
        if version == copy._version:
            return form
        if reads < PAYS:
            return None
        _forms[copy] = (copy._version, form := pack(copy.contiguous()))
        return form


def packed_bytes() -> int:
    """What all packed forms weigh."""
    with _lock:
        return sum(form.numel() * form.itemsize for _, form in list(_forms.values()))


def reader(indices: Sequence[int], layouts: Sequence[str]) -> Callable[[list[Tensor]], list[Tensor]]:
    """A function from a graph's copies to the forms it reads: form i is copy `indices[i]` in `layouts[i]`.

    A `weights.Binding` returns the same list for as long as nothing in it changed. The list and packed forms are kept
    between calls, but no copy: a reference to a copy would look like a pending backward.
    """
    places = list(zip(indices, layouts, strict=True))
    last: tuple[Any, ...] = ([], [], 0, [], [])

    def read(copies: list[Tensor]) -> list[Tensor]:
        nonlocal last
        known, stamps, reads, packed, plain = last  # one tuple, replaced whole: threads see one state or the other
        if known is not copies:
            now = [(id(copy), copy._version) for copy in copies]
            reads = reads if now == stamps else 0
            stamps = now
        if known is not copies or reads < PAYS:
            reads += 1
            if known is not copies or reads == PAYS:
                packed = [None if layout == "strided" else packed_form(copies[i], reads) for i, layout in places]
                plain = [(at, i) for at, (i, _) in enumerate(places) if packed[at] is None]
            last = (copies, stamps, reads, packed, plain)
        forms = packed.copy()
        for at, i in plain:
            forms[at] = copies[i]
        return forms

    return read
