"""Shared code of the optimizers' steps: lists of tensors, tables of their addresses, the kernel call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from . import native
from .triton.tables import StepTable


@dataclass
class StepTensors:
    """Lists with one entry per parameter, all tensors on one device; all entries of a parameter have its strides."""

    STATES: ClassVar[tuple[str, ...]]
    """The lists of state, in the order in which kernels take them."""
    OPTIONAL: ClassVar[str]
    """The list of state in which an entry may be None."""
    groups: Sequence[Any]
    params: list[Tensor] = field(default_factory=list)
    """float32"""
    grads: list[Tensor] = field(default_factory=list)
    """float32, float16 or bfloat16"""
    copies: list[Tensor | None] = field(default_factory=list)
    """float16 or bfloat16, written with the new weight; None for weights without a copy"""
    group_of: list[int] = field(default_factory=list)
    same: object = None
    """The same object as in an earlier step: only `groups` and `copies` have changed, no other address or type."""


def step_(
    name: str,
    tensors: StepTensors,
    multiplier: Tensor | None,
    found_inf: Tensor | None,
    workspace: dict[str, Any] | None,
) -> None:
    """Take the step of the optimizer `name`, `adam` or `sgd`."""
    workspace = {} if workspace is None else workspace
    table = table_of(tensors, workspace)
    settings = native.group_values(tensors.groups)
    if table.device.type == "cuda":
        from .triton import adam, sgd

        lrs = [group.lr for group in tensors.groups]
        step = {"adam": adam.step_, "sgd": sgd.step_}[name]
        step(table, settings, lrs, multiplier, found_inf, workspace)
    else:
        arrays = table.numels, table.addresses, *table.codes, table.group_of, settings
        native.call(name, len(table.numels), *arrays, multiplier, found_inf)


def table_of(tensors: StepTensors, workspace: dict[str, Any]) -> StepTable:
    """The table of the tensors, from the last step if they are the same."""
    t = tensors
    copies = [None if copy is None else (copy.data_ptr(), copy.dtype) for copy in t.copies]
    same, known_copies, table = workspace.get("step table", (None, None, None))
    if table is None or same is None or same is not t.same or known_copies != copies:
        rows = (t.grads, t.params, *(getattr(t, name) for name in t.STATES), t.copies)
        table = StepTable(
            t.params[0].device,
            native.sizes(t.params),
            np.array(t.group_of, dtype=np.int64),
            native.addresses(*rows),
            (native.dtype_codes(t.grads), native.dtype_codes(t.copies)),
            _kinds(t),
        )
        workspace["step table"] = t.same, copies, table
    return table


def _kinds(tensors: StepTensors) -> list[tuple[Any, Any, bool, np.ndarray]]:
    """Group tensors as in `StepTable.kinds`. Tensors without a copy join those with one, in the same launch."""
    t = tensors
    kinds: dict[tuple[Any, Any, bool], list[int]] = {}
    usual = next((copy.dtype for copy in t.copies if copy is not None), None)
    for i, (grad, copy, state) in enumerate(zip(t.grads, t.copies, getattr(t, t.OPTIONAL), strict=True)):
        kind = grad.dtype, usual if copy is None else copy.dtype, state is not None
        kinds.setdefault(kind, []).append(i)
    return [(*kind, np.array(chosen)) for kind, chosen in kinds.items()]
