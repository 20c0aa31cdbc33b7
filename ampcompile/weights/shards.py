"""Copies of this rank's parts of DTensor weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ampcompile.torch_private import dtensors, storages

from .binding import Binding
from .reports import watch_shards
from .store import store
from .table import PERHAPS_WRITTEN


class ShardBinding(Binding):
    """The copies that one compiled graph reads of its plain weights, and of the parts of those that are DTensors."""

    def copies(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Return the copies that the graph reads with these inputs; stale ones are cast first, all in one pass."""
        parts = tuple(map(dtensors.local_part, inputs))
        sharded = [i for i in self._indices if parts[i] is not inputs[i]]
        if sharded:
            watch_shards()
            # The part of a detached DTensor has a version counter of its own: whoever wrote through one has left no
            # trace. So parts are compared with their copies in each call.
            store.report({storages.storage_address(parts[i]) for i in sharded}, PERHAPS_WRITTEN)
        copies = super().copies(parts)
        for i in sharded:
            if inputs[i].requires_grad and self._read is not None:
                store.table.watch(parts[i], True)  # a part itself never requires gradients
        return copies
