"""Many tensors cast at once, each into a tensor that exists already."""

from collections.abc import Sequence

import torch
from torch import Tensor


def cast_many_(copies: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Write each weight, rounded to nearest, into the copy of the same shape and strides. Raises versions."""
    torch._foreach_copy_(list(copies), list(weights))
