"""Pack a weight's copy into oneDNN's blocks once that pays; a graph that reads it packed needs no other form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ampcompile.kernels.packed_conv import Blocks

if TYPE_CHECKING:
    from .copies import Copy

PAYS = 3
"""Reads of a copy before it is packed. Packing costs what it saves in as many calls: a weight that changes at every
call is never packed, and no program pays more than twice the least possible."""


class Packed:
    """A slot whose copy a graph reads packed: `tensor` is the packed form once there is one."""

    __slots__ = ("blocks", "copy")

    def __init__(self, copy: Copy, blocks: Blocks) -> None:
        self.copy, self.blocks = copy, blocks

    @property
    def tensor(self) -> Tensor | None:
        """The form to read now."""
        strided = self.copy.tensor  # first: another thread may pack the copy meanwhile, and free this form
        return self.copy.packed.get(self.blocks, strided)


def count_reads(slots: list[Packed]) -> list[Packed]:
    """Count a read of each slot, pack those for which it pays now, and return those that are still to be packed."""
    for slot in slots:
        copy = slot.copy
        copy.reads += 1
        if copy.reads >= PAYS and slot.blocks not in copy.packed:
            copy.pack(slot.blocks)
    return [slot for slot in slots if slot.blocks not in slot.copy.packed]
