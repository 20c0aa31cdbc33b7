"""Float32 weights kept as 16-bit parameters and what is beside each, in plain torch: the reference of the kernels.

Beside a parameter is one of

- its remainder, int16, with a checksum of every `SPAN` parameters. Parameter and remainder are a float32 master, bit
  for bit but for the payload of a NaN: the remainder is the low half of its bits; the parameter is the high half,
  rounded to nearest, ties away from zero, and the remainder's top bit tells whether rounding raised it. So it is with
  the remainders of Transformer Engine's `FusedAdam`. Ties to even wouldn't do, as one bit can't tell what they did.
- the high byte of that remainder, int8, with the same checksums: a master of 24 bits. In a step what is below is
  rounded at random, by the lowest byte of `states.random_words`, which coded states don't read; elsewhere to the
  nearest that has the same parameter. No finite number gets infinite.
- its float32 master, which rounds to the parameter as torch rounds.
- a key of random bits, int64: seed, number of the parameter, number of the step. The parameter is all there is, and
  rounded up or down at random, with the chance that makes it right on average.

A parameter that was written since counts as it is. That is seen by its own bits: where they don't sum up to the
checksum all remainders of that span count as 0, and where they aren't the master rounded, the master is the parameter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .states import SLICE, Rounding, random_words
from .tables import SPAN


def read_master(param: Tensor, beside: Tensor, checksums: Tensor | None, row: int = 0) -> Tensor:
    """Return the float32 weights of a parameter. `row`: as in `states.Coding`, where a span lies in one row."""
    if beside.dtype == torch.float32:
        return torch.where(beside.to(param.dtype) == param, beside, param.float())
    bits = in_memory_order(param, param).view(torch.int16).int() & 0xFFFF
    low = torch.zeros_like(bits)
    if checksums is not None:
        known = (checksums_of(bits, row) == checksums).repeat_interleave(SPAN).view(-1, -(-row // SPAN) * SPAN or SPAN)
        known = (known[:, :row] if row else known).flatten()[: len(bits)]
        low = torch.where(known, in_memory_order(beside, param).int() << 16 - 8 * beside.itemsize & 0xFFFF, low)
    bits = (bits - (low >> 15)) << 16 | low
    master = torch.empty_like(param, dtype=torch.float32)
    write_in_memory_order(master, param, bits.view(torch.float32))
    return master


def write_master(
    param: Tensor,
    beside: Tensor,
    checksums: Tensor | None,
    master: Tensor,
    row: int = 0,
    rounding: Rounding | None = None,
) -> None:
    """Round float32 weights to their parameter, and keep the rest beside it; see `read_master`.

    `rounding`: of a step, whose masters of 24 bits are rounded at random.
    """
    if beside.dtype == torch.float32:
        beside.copy_(master)
        param.copy_(master)
        return
    bits = in_memory_order(master, param).view(torch.int32)
    bits = torch.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)  # a carry into the sign would give a zero
    if checksums is None:
        count = len(bits) // row * -(-row // SPAN) * SPAN if row else len(bits)
        words = random_bits(beside.tolist(), count).to(bits.device)
        high = (bits + (words.view(len(bits) // row, -1)[:, :row].flatten() if row else words)) >> 16
    else:
        if beside.dtype == torch.int8:
            bits = _rounded_to_24_bits(bits, rounding)
        high = (bits + 0x8000) >> 16
        write_in_memory_order(beside, param, (bits >> 16 - 8 * beside.itemsize).to(beside.dtype))
        checksums.copy_(checksums_of(high & 0xFFFF, row))
    write_in_memory_order(param, param, high.to(torch.int16).view(torch.bfloat16))


def _rounded_to_24_bits(bits: Tensor, rounding: Rounding | None) -> Tensor:
    if rounding is None:
        up = bits + 0x80
        up = torch.where(up + 0x8000 >> 16 == bits + 0x8000 >> 16, up, bits)
    else:
        up = bits.clone()
        for top in range(0, len(bits), SLICE):
            part = up[top : top + SLICE]
            part += (random_words(1, rounding, top, len(part), bits.device) & 0xFF).int()
    return torch.where((bits & 0x7FFFFFFF) < 0x7F7FFF00, up, bits) & ~0xFF


def checksums_of(bits: Tensor, row: int = 0) -> Tensor:
    """int32: of each `SPAN` parameters a sum that changes with any one of them. `bits`: 16 of each, in a wider type."""
    place = torch.arange(SPAN, device=bits.device)
    factors = place * 0x9E3779B1 & 0xFFFFFFFF
    factors = (factors ^ factors >> 15) * 0x85EBCA6B & 0xFFFFFFFF | 1
    rows = bits.long().view(len(bits) // row, row) if row else bits.long()[None]
    spans = torch.nn.functional.pad(rows, (0, -rows.shape[1] % SPAN)).view(-1, SPAN)
    return (spans * factors).sum(1).int()


def random_bits(key: list[int], count: int) -> Tensor:
    """int32: 16 random bits for each of so many weights; one counter of Philox gives those of four."""
    seed, parameter, step = key
    group = torch.arange(-(-count // 4), device="cpu")
    numbers = (torch.tensor(number, device="cpu") for number in (step, parameter))
    words = philox((group, group >> 32, *numbers), seed)
    return (torch.stack(words, 1).flatten()[:count] & 0xFFFF).int()


def philox(counter: Sequence[Tensor], key: int) -> tuple[Tensor, ...]:
    """Philox 4x32-10 of Salmon et al. (2011): four words of 32 random bits for each counter of four such words."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = (word & mask for word in torch.broadcast_tensors(*counter))
    k0, k1 = key & mask, key >> 32 & mask
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32 & mask) ^ c1 ^ k0, b & mask, (a >> 32 & mask) ^ c3 ^ k1, a & mask
        k0, k1 = k0 + 0x9E3779B9 & mask, k1 + 0xBB67AE85 & mask
    return c0, c1, c2, c3


def in_memory_order(tensor: Tensor, param: Tensor) -> Tensor:
    """The elements of a tensor in the order in which `param` has them in memory."""
    return tensor.permute(_dimensions(param)).reshape(-1)


def write_in_memory_order(tensor: Tensor, param: Tensor, values: Tensor) -> None:
    """Write elements in that order."""
    permuted = tensor.permute(_dimensions(param))
    permuted.copy_(values.view(permuted.shape))


def _dimensions(param: Tensor) -> list[int]:
    strides = param.stride()
    return sorted(range(param.dim()), key=lambda dimension: -strides[dimension])
