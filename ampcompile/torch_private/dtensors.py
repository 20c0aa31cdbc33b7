"""This rank's parts of DTensors, which `to_local` gives in a hundred times the time. Private."""

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def includes(tensors: Sequence[Any]) -> bool:
    """Return True if one of them is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and module.DTensor in map(type, tensors)


def local_part(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, and other tensors as they are."""
    return getattr(tensor, "_local_tensor", tensor)


def has_plain_part(tensor: Any) -> bool:
    """Return True for a DTensor whose parts are plain tensors."""
    return includes([tensor]) and type(tensor._local_tensor) is Tensor


def local_parts(tensors: Sequence[Any], weights: Sequence[Tensor]) -> list[Any] | None:
    """Return this rank's parts of the tensors, plain tensors and None as they are.

    None if one isn't distributed as its weight is, or is waiting to be summed over ranks.
    """
    parts = []
    for tensor, weight in zip(tensors, weights, strict=True):
        spec, wanted = getattr(tensor, "_spec", None), getattr(weight, "_spec", None)
        if tensor is not None and spec is not wanted:
            if spec is None or wanted is None:
                return None
            if spec.mesh != wanted.mesh or spec.placements != wanted.placements:
                return None
        if spec is not None and any(placement.is_partial() for placement in spec.placements):
            return None
        parts.append(tensor if spec is None else tensor._local_tensor)
    return parts


def are_under_way(inputs: Sequence[Any]) -> bool:
    """Return True if one of them has a gradient and is the result of a collective that nobody has waited for.

    torch 2.13 differentiates graphs with such inputs wrongly: their gradients are others, or backward raises an error.
    """
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and any(
        isinstance(value, module.AsyncCollectiveTensor) and value.requires_grad for value in inputs
    )
