"""Dynamo's check, in C++, that tensors have the properties of earlier ones: 0.05 us a tensor."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C._dynamo import guards  # doesn't load Dynamo

_Guards: Any = guards.TensorGuards


class TensorGuards:
    """Records the properties of some tensors, at least one, without holding them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._count = len(tensors)
        self._guards = _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)

    def hold(self, tensors: Sequence[Any]) -> bool:
        """Return True if as many different tensors have the same classes, dtypes, devices, layouts, sizes and strides.

        Negated views, inference tensors and tensors that require grad differ from plain ones.
        """
        return len(tensors) == self._count and self._guards.check(*tensors)
