"""Numbers held against others, bit by bit or by distance; and the modes of torch that a call leaves as they were."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

CHUNK = 2**24
"""How many numbers are compared at once: logits of a batch are gigabytes in float64."""


def same_bits(a: Any, b: Any) -> bool:
    """True if two structures hold the same leaves in the same order: tensors of one dtype, one shape, and equal bits.

    0 is not -0, and infinity is no finite number. Every NaN counts as the same one, whatever its sign and payload:
    which of two operands' payloads survives an addition depends on the order in which a compiler puts them, and
    torch's own vectorized and scalar conversions to 16 bits write different ones.
    """
    left, right = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(left) == len(right) and all(map(_same_leaf, left, right))


def _same_leaf(a: Any, b: Any) -> bool:
    if type(a) is not type(b) and not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    if isinstance(a, float):
        return same_bits(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
    if not isinstance(a, Tensor):
        return a == b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(value: Tensor) -> Tensor:
    """The bits of numbers as integers, all NaN alike."""
    value = value.detach().resolve_conj().resolve_neg()
    value = torch.view_as_real(value) if value.is_complex() else value
    if not value.is_floating_point():
        return value
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.itemsize]
    return value.masked_fill(value.isnan(), torch.nan).view(integers)


def relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Distance of all tensors together, over their norm; both in float64."""
    apart = norm = 0.0
    for pair in zip(found, expected, strict=True):
        for f, e in zip(*map(chunks, pair), strict=True):
            exact = e.double()
            apart += float((f.double() - exact).square().sum())
            norm += float(exact.square().sum())
    return (apart / norm) ** 0.5


def chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """So many of its numbers at a time."""
    return tensor.flatten().split(CHUNK)


def modes() -> dict[str, object]:
    """State of this thread that a compiled call must leave as it found it."""
    devices = ("cpu", "cuda", "xpu", "mps")
    weights = sys.modules.get("ampcompile.weights.store")
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return {
        "autocast nesting": nesting,
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "torch functions": torch._C._is_torch_function_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "the lock of copies is held": weights is not None and weights.store.lock._is_owned(),
        **{f"autocast on {device}": torch.is_autocast_enabled(device) for device in devices},
        **{f"autocast dtype on {device}": torch.get_autocast_dtype(device) for device in devices},
    }
