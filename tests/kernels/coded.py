"""Steps with states in 16 and 8 bits, and with masters of 24 bits, beside the same in plain torch."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampcompile.kernels.masters import read_master, write_master
from ampcompile.kernels.states import Coding, Rounding, blocks_of, decode, encode, key_of
from ampcompile.kernels.tables import SPAN
from tests.scaler.cases import assert_equal

SHAPES = ((130, 67), (5, 64), (3, 128), (2, 200), (7, 33), (0, 40), (40, 512), (9, 3, 4, 4), (1, 20000))
SMALL = ((5, 67), (2, 128), (3, 256), (2, 33), (0, 40), (4, 3, 4, 4), (1, 700))


def in_rows(tensor: Tensor) -> Tensor:
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.view(1, -1)


def with_codes(tensors: Any, is_bfloat16: bool, first: int = 0) -> Any:
    """The same step with its states coded, to nearest."""
    ours = deepcopy(tensors)
    names = moments_of(ours)
    for i, param in enumerate(ours.params):
        if getattr(ours, names[0])[i] is None:
            continue
        rows = in_rows(param)
        shape = blocks_of(*rows.shape), len(names)
        scales = None if is_bfloat16 else torch.full(shape, torch.nan)
        for moment, name in enumerate(names):
            dtype = torch.bfloat16 if is_bfloat16 else (torch.int8, torch.uint8)[moment]
            codes = torch.zeros_like(param, dtype=dtype)
            value = getattr(ours, name)[i]
            encode(moment, in_rows(value), in_rows(codes), None if scales is None else scales[:, moment])
            getattr(ours, name)[i] = codes
        row = 0 if is_bfloat16 else rows.shape[1]
        ours.coding[i] = Coding(scales, row, first, key_of(7, i))
        ours.steps[i] = torch.tensor(float(3 * i))
    return ours


def moments_of(tensors: Any) -> list[str]:
    return [name for name in tensors.STATES if name != "steps" and "max" not in name]


def decoded(tensors: Any) -> Any:
    """The same step with float32 states, and with float32 parameters."""
    ours = deepcopy(tensors)
    for i, coding in enumerate(ours.coding):
        if coding is None:
            continue
        for moment, name in enumerate(moments_of(ours)):
            codes = getattr(ours, name)[i]
            value = torch.empty_like(codes, dtype=torch.float32)
            decode(moment, in_rows(codes), None if coding.scales is None else coding.scales[:, moment], in_rows(value))
            getattr(ours, name)[i] = value
    ours.coding = [None] * len(ours.params)
    return ours


def check_coded_step(step: Any, ours: Any, multiplier: float = 0.3) -> None:
    """Assert that a step is that on decoded states, coded as plain torch codes them."""
    plain, n = decoded(ours), len(ours.params)
    coding = deepcopy(ours.coding)
    if ours.NAME == "sgd":
        plain.steps = [None] * n
    for each in (ours, plain):
        step(each, torch.tensor(multiplier), torch.zeros(()))
    assert_equal(ours.params, plain.params)
    for copy, param in zip(ours.copies, ours.params, strict=True):
        assert copy is None or torch.equal(copy, param.to(copy.dtype))
    for i, before in enumerate(coding):
        if before is None:
            continue
        group = ours.groups[ours.group_of[i]]
        beta = group.beta1 if ours.NAME == "adam" else group.momentum
        rounding = Rounding(before.first, before.key, int(ours.steps[i].item()), beta > 0.99)
        for moment, name in enumerate(moments_of(ours)):
            codes, value = (in_rows(getattr(each, name)[i]) for each in (ours, plain))
            found = None if before.scales is None else ours.coding[i].scales[:, moment]
            expected, scales = torch.empty_like(codes), None if found is None else torch.empty_like(found)
            encode(moment, value, expected, scales, rounding)
            assert_equal([codes, found], [expected, scales])


def with_remainders(tensors: Any, dtype: torch.dtype = torch.int16) -> Any:
    """Its parameters in bfloat16, whose remainders have checksums of rows."""
    ours = replace(
        deepcopy(tensors), params=[p.bfloat16() for p in tensors.params], copies=[None] * len(tensors.params)
    )
    ours.kept = [torch.zeros_like(p, dtype=dtype) for p in ours.params]
    rows = [0 if coding is None else coding.row for coding in ours.coding]
    ours.checksums = [
        torch.zeros(blocks_of(p.numel() // row, row) // 2 if row else -(-p.numel() // SPAN), dtype=torch.int32)
        for p, row in zip(ours.params, rows, strict=True)
    ]
    for i, param in enumerate(ours.params):
        write_master(param, ours.kept[i], ours.checksums[i], tensors.params[i], rows[i])
    return ours


def check_steps_of_24_bits(step: Any, tensors: Any) -> None:
    """Assert that steps on masters of 24 bits are those on float32 parameters, rounded at random as in plain torch."""
    ours = with_remainders(tensors, torch.int8)
    for i, coding in enumerate(ours.coding):
        ours.coding[i] = coding or Coding(None, 0, 2**32 - 70, key_of(-7, i))
        ours.steps[i] = torch.zeros(()) if ours.steps[i] is None else ours.steps[i]
    for _ in range(2):
        wide = deepcopy(ours)
        for i, (kept, sums, coding) in enumerate(zip(ours.kept, ours.checksums, ours.coding, strict=True)):
            wide.params[i] = read_master(ours.params[i], kept, sums, coding.row)
            assert not (wide.params[i].view(torch.int32) & 0xFF).any()
        wide.kept = wide.checksums = [None] * len(wide.params)
        for each in (ours, wide):
            step(each, torch.tensor(0.3), torch.zeros(()))
        for name in ours.STATES:
            assert_equal(getattr(ours, name), getattr(wide, name))
        for i, (weight, coding) in enumerate(zip(wide.params, ours.coding, strict=True)):
            expected = [torch.empty_like(held[i]) for held in (ours.params, ours.kept, ours.checksums)]
            rounding = Rounding(coding.first, coding.key, int(ours.steps[i]), True)
            write_master(*expected, weight, coding.row, rounding)
            assert_equal([ours.params[i], ours.kept[i], ours.checksums[i]], expected)
