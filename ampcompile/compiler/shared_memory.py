"""Results that share memory still do as float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ampcompile.torch_private.storages import is_dense

Cast = Callable[[torch.Tensor], torch.Tensor]


def cast_together(tensors: Sequence[torch.Tensor], cast: Cast = torch.Tensor.float) -> list[torch.Tensor]:
    """Cast tensors of one memory to float32: one is cast, and the others are views of it.

    Gradients go to the tensor that autograd takes all of them to be views of. One of which that isn't so, or whose own
    hooks would be missed, is cast by itself.
    """
    root = _root(max(tensors, key=lambda t: (t.requires_grad, t.numel())))
    together = [t for t in tensors if _is_view(t, root)]
    if len(together) < 2:
        return [cast(t) for t in tensors]
    start = min(t.storage_offset() for t in together)
    stop = max(t.storage_offset() + _reach(t) for t in together)
    begin = root.storage_offset()
    whole = root
    if not (is_dense(root) and begin <= start and stop <= begin + root.numel()):
        whole, begin = root.as_strided((stop - start,), (1,), start), start
    wide = cast(whole)

    def widened(t: torch.Tensor) -> torch.Tensor:
        if t is whole:
            return wide
        if not any(t is each for each in together):
            return cast(t)
        view = wide.as_strided(t.shape, t.stride(), t.storage_offset() - begin)
        return view.detach() if view.requires_grad and not t.requires_grad else view

    return [widened(t) for t in tensors]


def _root(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a view's gradient goes to; of what is no view, or has no gradient, itself."""
    return tensor._base if tensor._base is not None and tensor.requires_grad and not tensor.is_leaf else tensor


def _is_view(tensor: torch.Tensor, root: torch.Tensor) -> bool:
    """Whether a view of `root` may stand for a tensor of the same memory."""
    if not type(tensor) is type(root) is torch.Tensor:
        return False
    hooked = tensor._backward_hooks or tensor.retains_grad
    return tensor is root or not tensor.requires_grad or (_root(tensor) is root and not hooked)


def _reach(tensor: torch.Tensor) -> int:
    """How many elements of memory lie between the first and the last of a tensor, with both."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
