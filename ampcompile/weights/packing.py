"""When a weight's copy is packed: once that pays. Whoever reads it packed then needs no other form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ampcompile.kernels.packed_conv import Blocks

if TYPE_CHECKING:
    from .copies import Copy

PAYS = 3
"""How often a copy is read before it is packed. Packing costs what it saves in as many calls: a weight that changes at
every call is never packed, and nobody pays more than twice what would have been best."""


class Packed:
    """Stands for a copy that a graph reads packed: `tensor` is the packed form once there is one."""

    __slots__ = ("blocks", "copy")

    def __init__(self, copy: Copy, blocks: Blocks) -> None:
        self.copy, self.blocks = copy, blocks

    @property
    def tensor(self) -> Tensor | None:
        """The form to read now."""
        strided = self.copy.tensor  # first: another thread may pack it meanwhile, and let go of it
        return self.copy.packed.get(self.blocks, strided)


def count_reads(read: list[Packed]) -> list[Packed]:
    """One more read of each; packs those for which it pays now, and returns those that are still to be packed."""
    for each in read:
        copy = each.copy
        copy.reads += 1
        if copy.reads >= PAYS and each.blocks not in copy.packed:
            copy.pack(each.blocks)
    return [each for each in read if each.blocks not in each.copy.packed]
