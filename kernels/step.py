"""Shared code of the optimizers' steps: lists of tensors, tables of their addresses, the kernel call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ampcompile.torch_private import foreach

from . import native
from .masters import read_master, write_master
from .triton.tables import Kind, StepTable


@dataclass
class StepTensors:
    """Lists with one entry per parameter, all tensors on one device; all entries of a parameter have its strides."""

    STATES: ClassVar[tuple[str, ...]]
    """The lists of state, in the order in which kernels take them."""
    OPTIONAL: ClassVar[str]
    """The list of state in which an entry may be None."""
    groups: Sequence[Any]
    params: list[Tensor] = field(default_factory=list)
    """float32, float16 or bfloat16"""
    grads: list[Tensor] = field(default_factory=list)
    """float32, float16 or bfloat16"""
    copies: list[Tensor | None] = field(default_factory=list)
    """float16 or bfloat16, written with the new weight; None for weights without a copy, and for 16-bit parameters"""
    kept: list[Tensor | None] = field(default_factory=list)
    """State that keeps the precision of 16-bit parameters, see `masters`; None for others. May be empty, as the next"""
    checksums: list[Tensor | None] = field(default_factory=list)
    """Those of parameters with remainders; else None"""
    group_of: list[int] = field(default_factory=list)
    same: object = None
    """The same object as in an earlier step: only `groups` and `copies` have changed, no other address or type."""

    def __post_init__(self) -> None:
        self.kept = self.kept or [None] * len(self.params)
        self.checksums = self.checksums or [None] * len(self.params)

    def read_weight(self, i: int) -> Tensor:
        """The float32 values of a parameter, for a step in plain torch."""
        kept = self.kept[i]
        return self.params[i] if kept is None else read_master(self.params[i], kept, self.checksums[i])

    def write_weight(self, i: int, weight: Tensor, skip: Tensor) -> None:
        """Write new values of a parameter, unless the step is skipped, and its copy."""
        kept, copy = self.kept[i], self.copies[i]
        if kept is None:
            self.params[i].copy_(torch.where(skip != 0, self.params[i], weight))
        elif skip == 0:
            write_master(self.params[i], kept, self.checksums[i], weight)
        if copy is not None:
            copy.copy_(self.params[i])

    def count_step(self) -> None:
        """Begin a step: random bits that round parameters differ from step to step, skipped ones too."""
        keys = [key for key in self.kept if key is not None and key.dtype == torch.int64]
        if keys:
            foreach.add_(keys, [_one_step(keys[0].device)] * len(keys))


@functools.cache
def _one_step(device: torch.device) -> Tensor:
    return torch.tensor([0, 0, 1], device="cpu").to(device, non_blocking=True)


def step_(
    name: str,
    tensors: StepTensors,
    multiplier: Tensor | None,
    found_inf: Tensor | None,
    workspace: dict[str, Any] | None,
) -> None:
    """Take the step of the optimizer `name`, `adam` or `sgd`."""
    tensors.count_step()
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
        beside = [copy if kept is None else kept for copy, kept in zip(t.copies, t.kept, strict=True)]
        rows = (t.grads, t.params, *(getattr(t, name) for name in t.STATES), beside, t.checksums)
        table = StepTable(
            t.params[0].device,
            native.sizes(t.params),
            np.array(t.group_of, dtype=np.int64),
            native.addresses(*rows),
            (native.dtype_codes(t.grads), native.dtype_codes(t.params), native.dtype_codes(beside)),
            _kinds(t, beside),
        )
        workspace["step table"] = t.same, copies, table
    return table


def _kinds(tensors: StepTensors, beside: list[Tensor | None]) -> list[Kind]:
    """Group tensors as in `StepTable.kinds`. Tensors without a copy join those with one, in the same launch."""
    t = tensors
    kinds: dict[tuple[torch.dtype, torch.dtype, torch.dtype | None, bool], list[int]] = {}
    usual = next((copy.dtype for copy in t.copies if copy is not None), None)
    for i, (grad, param, other, state) in enumerate(
        zip(t.grads, t.params, beside, getattr(t, t.OPTIONAL), strict=True)
    ):
        kind = grad.dtype, param.dtype, usual if other is None else other.dtype, state is not None
        kinds.setdefault(kind, []).append(i)
    return [Kind(*kind, np.array(chosen)) for kind, chosen in kinds.items()]
