"""Optimizer states in 16 or 8 bits, in plain torch: the reference of the kernels; it also saves and loads them.

In 8 bits, 64 numbers share a float32 scale, the largest finite magnitude of them. Blocks lie in rows, behind the first
dimension, in memory's order, and begin anew with each row. `rows` below are tensors of shape (rows, numbers).

- The first moment is companded, so that small numbers keep digits: with r = |m| / scale, q = 254 r / (1 + r) in seven
  bits, and a sign. Back, m = q / (254 - q) * scale. A scale below 2^-117 is 0.
- The second moment is coded by its root: with r = sqrt(v) / scale, where the scale is a root too, q = 255 r in eight
  bits. Back, v = (q / 255 * scale)^2. A scale below 2^-55 is 0; else a number above 0 has no code of 0.
- What isn't finite counts as the scale.

All operations are those of float32, in this order, each rounded once. So what was just decoded is coded to nearest with
the same codes and scales, and files need no codes.

In 16 bits states are bfloat16. In a step the second moment is rounded at random, and so is a first one that remembers
long: else a decay by a thousandth, less than the step between two codes, would never happen, or always.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .tables import CODES, LEAST_SCALES, SPAN

SLICE = 1 << 18  # numbers that are coded at once, so that what is needed meanwhile stays small


class Coding(NamedTuple):
    """How a kernel finds the states of a parameter that are coded, and rounds them and a master of 24 bits."""

    scales: Tensor | None  # float32 (blocks, moments) of 8 bits; else None
    row: int  # numbers behind the first dimension; 0 but for 8 bits
    first: int  # the place of its first element in the whole parameter
    key: int  # 64 bits: of the seed and the parameter, see `key_of`


class Rounding(NamedTuple):
    """What decides the rounding of a parameter's states, or of its master of 24 bits, in one step."""

    first: int
    key: int
    step: int
    first_at_random: bool


def blocks_of(count: int, row: int) -> int:
    """The number of scales for so many rows of so many numbers: a span of two blocks belongs to one row."""
    return count * -(-row // SPAN) * (SPAN // CODES)


def key_of(seed: int, parameter: int) -> int:
    """The key of the `parameter`-th in an optimizer with this seed, signed (splitmix64)."""
    mask = (1 << 64) - 1
    x = seed + (parameter + 1) * 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def encode(moment: int, rows: Tensor, codes: Tensor, scales: Tensor | None, rounding: Rounding | None = None) -> None:
    """Write float32 numbers as codes, and their scales: to nearest or, in a step, as the kernels round.

    `moment`: 0 for the first, 1 for squares. `codes`: of the shape of `rows`; int8, for squares uint8, or bfloat16.
    `scales`: (blocks,); None for bfloat16.
    """
    count, length = rows.shape
    height = max(1, SLICE // max(1, length))
    for top in range(0, count, height):
        x = rows[top : top + height].float()
        words = None
        if rounding is not None and (moment == 1 or rounding.first_at_random):
            words = random_words(moment, rounding, top * length, x.numel(), x.device).view(x.shape)
        if scales is None:
            codes[top : top + height] = x.bfloat16() if words is None else _bfloat16_at_random(x, words)
            continue
        padded = torch.nn.functional.pad(x, (0, -length % SPAN))
        whole = padded.view(-1, CODES)
        magnitudes = _root(whole) if moment else whole.abs()
        largest = torch.where(magnitudes.isfinite(), magnitudes, 0.0).amax(1)
        largest = torch.where(largest < LEAST_SCALES[moment], 0.0, largest)
        scales[blocks_of(top, length) :][: len(largest)] = largest
        ratios = magnitudes / largest[:, None]
        ratios = torch.where(ratios <= 1, ratios, 1.0).view(padded.shape)[:, :length]
        exact = 255 * ratios if moment else 254 * ratios / (1 + ratios)
        below = exact.floor()
        chance = 0.5 if words is None else (words >> 8).float() * 2.0**-24
        q = below + (chance < exact - below).float()
        q = torch.maximum(q, (x > 0).float()) if moment else torch.where(x < 0, -q, q)
        live = (largest != 0)[:, None].expand(whole.shape).reshape(padded.shape)[:, :length]
        codes[top : top + height] = torch.where(live, q, 0.0).to(codes.dtype)


def decode(moment: int, codes: Tensor, scales: Tensor | None, rows: Tensor) -> None:
    """Write the float32 numbers of codes; see `encode`."""
    if scales is None:
        rows.copy_(codes)
        return
    count, length = rows.shape
    height = max(1, SLICE // max(1, length))
    for top in range(0, count, height):
        q = torch.nn.functional.pad(codes[top : top + height].float(), (0, -length % SPAN)).view(-1, CODES)
        scale = scales[blocks_of(top, length) :][: len(q), None]
        x = (q / 255 * scale).square() if moment else q / (254 - q.abs()) * scale
        rows[top : top + height] = x.view(-1, length + -length % SPAN)[:, :length]


def random_words(moment: int, rounding: Rounding, offset: int, count: int, device: torch.device) -> Tensor:
    """int64: 32 random bits for each of so many elements from an offset on, other ones for each moment."""
    mask = 0xFFFFFFFF
    place = torch.arange(rounding.first + offset, rounding.first + offset + count, device=device)
    begin = _mixed((rounding.key + _mixed(rounding.step)) & mask)
    middle = _mixed((rounding.key >> 32 & mask) ^ begin)
    x = place + (place >> 32) * 0x9E3779B1 + begin & mask
    x = (x ^ x >> 16) * 0x7FEB352D & mask
    x = (x ^ x >> 15 ^ middle) * 0x846CA68B & mask
    x ^= x >> 16
    if moment == 0:
        x = x * 0x9E3779B1 + middle & mask
        x = (x ^ x >> 15) * 0x85EBCA6B & mask
        x ^= x >> 13
    return x


def _mixed(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def _root(x: Tensor) -> Tensor:
    """The root, rounded once: torch's of float32 is off by one on some CPUs."""
    return x.double().sqrt().float()


def _bfloat16_at_random(x: Tensor, words: Tensor) -> Tensor:
    """One of the two next bfloat16, by 16 random bits, which never make infinity of it."""
    bits = x.view(torch.int32).long()
    magnitude = bits & 0x7FFFFFFF
    high = ((magnitude + (words >> 16)) >> 16).clamp(max=0x7F7F)
    signed = torch.where(bits < 0, high - 0x8000, high).to(torch.int16).view(torch.bfloat16)
    return torch.where(x.isfinite(), signed, x.bfloat16())
