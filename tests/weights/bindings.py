"""Bindings as compiled graphs have them, of graphs that read one copy of each input."""

from collections.abc import Sequence

import torch

from ampcompile.kernels.packed_conv import Blocks
from ampcompile.weights import Binding, CopySpec, Form


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
