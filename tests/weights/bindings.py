"""Bindings as compiled graphs have them, of graphs that read one copy of each input."""

from collections.abc import Sequence

import pytest
import torch

from ampcompile.kernels.packed_conv import Blocks
from ampcompile.weights import Binding, CopySpec, Form
from ampcompile.weights.store import store


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


def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by an item, the number of copies, with each comparison of copies and weights."""
    found: list[int] = []
    compare = store.table.compare
    monkeypatch.setattr(store.table, "compare", lambda n, *rest: (found.append(n), compare(n, *rest)))
    return found
