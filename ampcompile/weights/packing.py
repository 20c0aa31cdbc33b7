"""When a weight's copy is packed: once that pays. Whoever reads it packed then needs no other form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .copies import Copy

PAYS = 3
"""How often a copy is read before it is packed. Packing costs what it saves in as many calls: a weight that changes at
every call is never packed, and nobody pays more than twice what would have been best."""


class Packed:
    """Stands for a copy that a graph reads packed: `tensor` is the packed form once there is one."""

    __slots__ = ("copy",)

    def __init__(self, copy: Copy) -> None:
        self.copy = copy

    @property
    def tensor(self) -> Tensor | None:
        """The form to read now."""
        copy = self.copy
        return copy.tensor if copy.packed is None else copy.packed


def count_reads(copies: list[Copy]) -> list[Copy]:
    """One more read of each; packs those for which it pays now, and returns those that are still to be packed."""
    for copy in copies:
        copy.reads += 1
        if copy.reads >= PAYS and copy.tensor is not None and copy.packed is None:
            copy.pack()
    return [copy for copy in copies if copy.packed is None]
