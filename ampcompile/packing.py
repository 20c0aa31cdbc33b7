"""Packed forms of weight copies: made once they pay, shared by all graphs that read them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .kernels.packed_linear import pack

PAYS = {"packed": 3, "packed_t": 8}
"""How often a copy is read before it is packed. Packing costs what it saves in as many calls: a weight that changes at
every call is never packed, and nobody pays more than twice what would have been best."""

# Each layout of `passes.weight_copy.Slot` as a view of the copy; oneDNN's product takes a plain second operand too.
_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": lambda copy: copy,
    "packed": lambda copy: copy,
    "packed_t": Tensor.t,
}
_forms: Any = WeakTensorKeyDictionary()  # copy -> (its version, {layout: packed form})
_lock = threading.Lock()


def packed_form(copy: Tensor, layout: str, reads: int) -> Tensor | None:
    """`copy` packed, if someone has packed it already or `reads` are enough. A copy that changed gets new forms: old
    ones are never written, so a backward still waiting for one keeps the weights of its own forward."""
    if layout == "strided":
        return None
    with _lock, torch.inference_mode(False), torch.no_grad():
        version, forms = _forms.get(copy, (None, {}))
        if version != copy._version:
            _forms[copy] = (copy._version, forms := {})
        if layout not in forms and reads >= PAYS[layout]:
            forms[layout] = pack(_PLAIN[layout](copy).contiguous())
        return forms.get(layout)


def packed_bytes() -> int:
    """What all packed forms weigh."""
    with _lock:
        return sum(form.numel() * form.itemsize for _, forms in list(_forms.values()) for form in forms.values())


def reader(indices: Sequence[int], layouts: Sequence[str]) -> Callable[[list[Tensor]], list[Tensor]]:
    """A function from a graph's copies to the forms it reads: form i is copy `indices[i]` in `layouts[i]`.

    A `weights.Binding` returns the same list for as long as nothing in it changed. The list and packed forms are kept
    between calls, but no copy and no view of one: a reference to a copy would look like a pending backward.
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
        if known is not copies or reads < max(PAYS.values()):
            reads += 1
            if known is not copies or reads in PAYS.values():
                packed = [packed_form(copies[i], layout, reads) for i, layout in places]
                plain = [(at, i, _PLAIN[layout]) for at, (i, layout) in enumerate(places) if packed[at] is None]
            last = (copies, stamps, reads, packed, plain)
        forms = packed.copy()
        for at, i, view in plain:
            forms[at] = view(copies[i])
        return forms

    return read
