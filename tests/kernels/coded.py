"""States in 16 and 8 bits in NumPy, operations of float32 as those of float64, rounded once; and steps with them."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ampcompile.kernels.masters import checksums_of, in_memory_order, read_master, write_master
from ampcompile.kernels.states import Coding, Rounding, blocks_of, decode, encode, key_of
from ampcompile.kernels.tables import SPAN
from tests.scaler.cases import assert_equal

SHAPES = ((130, 67), (5, 64), (3, 128), (2, 200), (7, 33), (0, 40), (40, 512), (9, 3, 4, 4), (1, 20000))
SMALL = ((5, 67), (2, 128), (3, 256), (2, 33), (0, 40), (4, 3, 4, 4), (1, 700))


def f32(x: Any) -> Any:
    with np.errstate(over="ignore"):
        return np.asarray(x, dtype=np.float64).astype(np.float32)


def wide(x: Any) -> Any:
    return np.asarray(x).astype(np.float64)


def numpy_words(moment: int, r: Rounding, count: int) -> Any:
    """uint64: see `random_words`."""
    low = np.uint64(0xFFFFFFFF)

    def mixed(x: Any, *factors: tuple[int, int]) -> Any:
        for shift, factor in factors:
            x = (x ^ x >> np.uint64(shift)) * np.uint64(factor) & low
        return x

    usual = (16, 0x7FEB352D), (15, 0x846CA68B)
    key = np.uint64(r.key % 2**64)
    with np.errstate(over="ignore"):
        begin = mixed(np.uint64(r.step), *usual)
        begin ^= begin >> np.uint64(16)
        begin = mixed((key & low) + begin & low, *usual)
        begin ^= begin >> np.uint64(16)
        middle = mixed(key >> np.uint64(32) ^ begin, *usual)
        middle ^= middle >> np.uint64(16)
        place = np.arange(count, dtype=np.uint64) + np.uint64(r.first)
        x = mixed(place + (place >> np.uint64(32)) * np.uint64(0x9E3779B1) + begin & low, usual[0])
        x = (x ^ x >> np.uint64(15) ^ middle) * np.uint64(0x846CA68B) & low
        x ^= x >> np.uint64(16)
        if moment == 0:
            x = mixed(x * np.uint64(0x9E3779B1) + middle & low, (15, 0x85EBCA6B))
            x ^= x >> np.uint64(13)
    return x


def numpy_encode(moment: int, values: Tensor, is_bfloat16: bool, rounding: Rounding | None) -> tuple[Any, Any]:
    """Codes and scales of a (rows, numbers) tensor; of bfloat16 the bits, and no scales."""
    x = values.numpy()
    words = None
    if rounding is not None and (moment == 1 or rounding.first_at_random):
        words = numpy_words(moment, rounding, x.size).reshape(x.shape)
    if is_bfloat16:
        nearest = values.bfloat16().view(torch.int16).numpy()
        if words is None:
            return nearest, None
        bits = x.view(np.uint32).astype(np.uint64)
        magnitude = bits & np.uint64(0x7FFFFFFF)
        high = np.minimum(magnitude + (words >> np.uint64(16)) >> np.uint64(16), 0x7F7F)
        rounded = (high | bits >> np.uint64(31) << np.uint64(15)).astype(np.uint16).view(np.int16)
        return np.where(np.isfinite(x), rounded, nearest), None
    codes = np.zeros(x.shape, np.uint8 if moment else np.int8)
    scales = np.zeros((len(x), blocks_of(1, x.shape[1])), np.float32)
    chance = np.full(x.shape, 0.5) if words is None else (words >> np.uint64(8)) / 2.0**24
    for block in range(-(-x.shape[1] // 64)):
        part = np.s_[:, 64 * block : 64 * block + 64]
        y = x[part]
        with np.errstate(all="ignore"):
            sizes = f32(np.sqrt(wide(y))) if moment else np.abs(y)
            scale = np.where(np.isfinite(sizes), sizes, 0).max(1, keepdims=True)
            scale[scale < (2.0**-55 if moment else 2.0**-117)] = 0
            ratio = f32(wide(sizes) / wide(scale))
            ratio = np.where(ratio <= 1, ratio, np.float32(1))
            companded = f32(wide(f32(254 * wide(ratio))) / wide(f32(1 + wide(ratio))))
            exact = f32(255 * wide(ratio)) if moment else companded
            q = np.floor(exact)
            q = q + (chance[part] < exact - q)
            q = np.maximum(q, y > 0) if moment else np.where(y < 0, -q, q)
            codes[part] = np.where(scale == 0, 0, q)
        scales[:, block] = scale[:, 0]
    return codes, scales.reshape(-1)


def numpy_decode(moment: int, codes: Tensor, scales: Tensor) -> Any:
    """float32 (rows, numbers)."""
    q, s = wide(codes.numpy()), wide(scales.numpy().reshape(len(codes), -1))
    s = np.repeat(s, 64, 1)[:, : q.shape[1]]
    if moment:
        root = f32(wide(f32(q / 255)) * s)
        return f32(wide(root) ** 2)
    return f32(wide(f32(q / (254 - np.abs(q)))) * s)


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
    """Assert that a step is that on decoded states, coded as NumPy codes them."""
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
            expected, scales = numpy_encode(moment, value, before.scales is None, rounding)
            found = codes.view(torch.int16) if before.scales is None else codes
            assert torch.equal(found, torch.from_numpy(expected)), (name, tuple(codes.shape))
            if before.scales is not None:
                assert_equal([ours.coding[i].scales[:, moment]], [torch.from_numpy(scales)])


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
    """Assert that steps on masters of 24 bits are those on float32 parameters, rounded at random as NumPy rounds."""
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
            x = np.where(np.isnan(weight.numpy()), np.float32(np.nan), weight.numpy()).reshape(-1)
            bits = x.view(np.uint32).astype(np.uint64)
            words = numpy_words(1, Rounding(coding.first, coding.key, int(ours.steps[i]), True), x.size)
            rounded = bits + np.where(np.abs(x.astype(np.float64)) < 2.0**128 - 2.0**112, words & np.uint64(0xFF), 0)
            high = (rounded + np.uint64(0x8000) >> np.uint64(16)).astype(np.uint16).view(np.int16)
            low = (rounded >> np.uint64(8)).astype(np.uint8).view(np.int8)
            assert np.array_equal(in_memory_order(ours.params[i], weight).view(torch.int16), high)
            assert np.array_equal(in_memory_order(ours.kept[i], weight), low)
            sums = checksums_of(torch.from_numpy(high).int() & 0xFFFF, coding.row)
            assert torch.equal(ours.checksums[i], sums)
