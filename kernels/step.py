"""Shared code of the optimizers' steps: lists of tensors, tables of their addresses, the kernel call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ampcompile.torch_private import marks, optimizers
from ampcompile.torch_private.own_thread import made_once

from . import native, tables
from .states import Coding
from .tables import BESIDE_ROW, GradTable, Kind, StepTable

Quantized = Mapping[int, tuple[Tensor, Tensor]]
"""Buffers of quantized weights, see `fp8.buffer_like`, and the weights, which lie row by row; by index"""


@dataclass
class StepTensors:
    """Lists with one entry per parameter, all tensors on one device; all entries of a parameter have its strides."""

    NAME: ClassVar[str]  # of the kernel
    STATES: ClassVar[dict[str, str]]  # lists of state, in the order of the kernels, with torch's name of each
    OPTIONAL: ClassVar[tuple[str, str]]  # one whose entries may be None, and the group's setting that is 0 then
    OF_CODED: ClassVar[tuple[str, ...]] = ()  # lists of step counts that only parameters with `coding` have
    groups: Sequence[Any]
    params: list[Tensor] = field(default_factory=list)  # float32, float16 or bfloat16
    grads: list[Tensor] = field(default_factory=list)  # float32, float16 or bfloat16
    # float16 or bfloat16, written with the new weight; None for weights without a copy, and for 16-bit parameters.
    copies: list[Tensor | None] = field(default_factory=list)
    # State that keeps the precision of 16-bit parameters, see `masters`; None for others. May be empty, as the next.
    kept: list[Tensor | None] = field(default_factory=list)
    checksums: list[Tensor | None] = field(default_factory=list)  # of parameters with remainders; else None
    # For parameters whose first states, of those in `STATES`, are bfloat16 or codes, or that keep masters of 24 bits;
    # others may have one, or None. May be empty.
    coding: list[Coding | None] = field(default_factory=list)
    quantized: Quantized = field(default_factory=dict)  # written with the new weights
    group_of: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.copies = self.copies or [None] * len(self.params)
        self.kept = self.kept or [None] * len(self.params)
        self.checksums = self.checksums or [None] * len(self.params)
        self.coding = self.coding or [None] * len(self.params)

    def take_step(self, multiplier: Tensor | None, found_inf: Tensor | None, workspace: dict[str, Any] | None) -> None:
        """Take a step by the kernel; see `adam_` and `sgd_`."""
        rates, settings = [group.lr for group in self.groups], native.group_values(self.groups)
        step_(self.NAME, table_of(self), settings, rates, multiplier, found_inf, workspace, self.quantized)


def quantize(weights: Quantized) -> None:
    """Quantize weights into their buffers."""
    if weights:
        from .fp8 import quantize_many_  # defines ops that few need

        quantize_many_(*zip(*weights.values(), strict=True))


def _count_step(keys: list[Tensor]) -> None:
    if keys:
        with torch.no_grad():
            optimizers.add_(keys, [_one_step(keys[0].device)] * len(keys))


def _count_steps(counts: list[Tensor], found_inf: Tensor | None) -> None:
    """Count a step, unless it is skipped, of tensors whose kernel doesn't."""
    if counts:
        with torch.no_grad():
            one = torch.ones_like(counts[0]) if found_inf is None else (found_inf == 0).to(torch.float32).reshape(())
            optimizers.add_(counts, [one] * len(counts))


@made_once
def _one_step(device: torch.device) -> Tensor:
    return torch.tensor([0, 0, 1], dtype=torch.int64, device=device)  # waits until it is there


def step_(
    name: str,
    table: StepTable,
    settings: np.ndarray,
    rates: Sequence[float | Tensor],
    multiplier: Tensor | None,
    found_inf: Tensor | None,
    workspace: dict[str, Any] | None,
    quantized: Quantized,
) -> None:
    """Take the step of the optimizer `name`, `adam` or `sgd`, on the tensors of a table, and quantize weights.

    `settings`: see `native.group_values`. `rates`: the groups' learning rates.
    """
    with marks.region(f"amp: {name}_"):
        _count_step(table.keys)
        if tables.by_triton(table.grads.device):
            from .triton import adam_and_sgd, quantize_many

            _count_steps(table.counts, found_inf)
            quantize_many.take(table, quantized)
            table.kinds = table.kinds or kinds_of(table)
            workspace = {} if workspace is None else workspace
            adam_and_sgd.step_(name, table, settings, rates, multiplier, found_inf, workspace)
        else:
            native.call(name, len(table.grads.numels), table.place, settings, multiplier, found_inf)
            quantize(quantized)


def grad_table(grads: Sequence[Tensor], addresses: np.ndarray | None = None) -> GradTable:
    """The table of gradients on one device. `addresses`: theirs, an array of the caller's."""
    codes, dtypes = native.dtype_codes(grads), [grad.dtype for grad in grads]
    by_dtype = {
        dtype: np.array([i for i, each in enumerate(dtypes) if each == dtype]) for dtype in dict.fromkeys(dtypes)
    }
    addresses = tables.addresses(grads)[0] if addresses is None else addresses
    return GradTable(grads[0].device, tables.sizes(grads), addresses, codes, by_dtype)


def table_of(tensors: StepTensors) -> StepTable:
    """The table of a step's tensors."""
    t = tensors
    beside = [copy if kept is None else kept for copy, kept in zip(t.copies, t.kept, strict=True)]
    none: list[Tensor | None] = [None] * len(t.params)
    counts = [getattr(t, name) for name in t.OF_CODED]
    states = [*(getattr(t, name) for name in t.STATES), *counts]
    scales = [None if coding is None else coding.scales for coding in t.coding]
    addresses = tables.addresses(t.grads, t.params, *states, scales, none, none, none, beside, t.checksums, none, none)
    for i, coding in enumerate(t.coding):
        if coding is not None:
            addresses[tables.ROW_ROW : BESIDE_ROW, i] = coding.row, coding.first, coding.key
    grads = grad_table(t.grads, addresses[0])
    rows = np.array([0 if coding is None else coding.row for coding in t.coding], dtype=np.int64)
    state_codes = np.where(rows, native.DTYPE_CODES[torch.int8], native.dtype_codes(states[0]))
    codes = grads.codes, native.dtype_codes(t.params), native.dtype_codes(beside), state_codes
    keys = [kept for kept in t.kept if kept is not None and kept.dtype == torch.int64]
    optional = 2 + list(t.STATES).index(t.OPTIONAL[0])
    lengths = np.maximum(rows, 1)
    padded = np.where(rows, grads.numels // lengths * -(-lengths // tables.SPAN) * tables.SPAN, grads.numels)
    counted = [count for each in counts for count in each if count is not None]
    return StepTable(grads, np.array(t.group_of, dtype=np.int64), addresses, codes, optional, padded, keys, counted)


def take_copies(table: StepTable, copies: Mapping[int, tuple[Tensor, torch.dtype]]) -> None:
    """Let the step write these copies, by their parameters' indices, with float32 parameters, and no others.

    With each the type that it is rounded to, in which it is held or, on a CPU, as float32.
    """
    places = {
        i: (copy.data_ptr(), native.DTYPE_CODES[dtype] + native.WIDE * (copy.dtype != dtype))
        for i, (copy, dtype) in copies.items()
    }
    if places != table.copies:
        beside, codes = table.addresses[BESIDE_ROW], table.codes[2]
        for i in table.copies:
            beside[i] = codes[i] = 0
        for i, place in places.items():
            beside[i], codes[i] = place
        table.copies, table.kinds = places, []


def kinds_of(table: StepTable) -> list[Kind]:
    """Group tensors as in `StepTable.kinds`. Tensors without a copy join those with one, in the same launch."""
    dtypes = list(native.DTYPE_CODES)
    kinds: dict[tuple[torch.dtype, torch.dtype, torch.dtype | None, torch.dtype, bool], list[int]] = {}
    rows = *table.codes, table.addresses[BESIDE_ROW] != 0, table.addresses[table.optional] != 0
    usual = next((dtypes[row[2]] for row in zip(*rows, strict=True) if row[4] and not row[1]), None)
    for i, (grad, param, code, state, there, has_state) in enumerate(zip(*rows, strict=True)):
        kind = dtypes[grad], dtypes[param], dtypes[code] if there else usual, dtypes[state], bool(has_state)
        kinds.setdefault(kind, []).append(i)
    return [Kind(*kind, np.array(chosen)) for kind, chosen in kinds.items()]
