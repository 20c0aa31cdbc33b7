"""Cast results that share memory to float32 such that they still share memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd.function import BackwardCFunction

from ampcompile.torch_private.storages import is_dense

Cast = Callable[[torch.Tensor], torch.Tensor]


def cast_together(tensors: Sequence[torch.Tensor], cast: Cast = torch.Tensor.float) -> list[torch.Tensor]:
    """Cast tensors that share memory to float32: cast one, and return the others as views of the result.

    Gradients flow to the tensor that is the base of all views in autograd. A tensor that isn't a view of it, or has
    hooks of its own that wouldn't run, is cast by itself.
    """
    root = root_of(max(tensors, key=lambda t: (t.requires_grad, t.numel())))
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


def root_of(tensor: torch.Tensor) -> torch.Tensor:
    """The base to which a view's gradient flows; the tensor itself if it has no gradient, or one of its own.

    A custom autograd function may return a view, also of its input: the gradient of that is the function's.
    """
    if (base := tensor._base) is None or not (tensor.requires_grad and base.requires_grad):
        return tensor
    node, number = tensor.grad_fn, tensor.output_nr
    while (node, number) != (base.grad_fn, base.output_nr) and getattr(node, "variable", None) is not base:
        if isinstance(node, BackwardCFunction | None) or len(node.next_functions) != 1:
            return tensor
        node, number = node.next_functions[0]
    return base


def _is_view(tensor: torch.Tensor, root: torch.Tensor) -> bool:
    """True if a view of `root` may replace a tensor of the same memory."""
    if not type(tensor) is type(root) is torch.Tensor or tensor.dtype != root.dtype:
        return False
    hooked = tensor._backward_hooks or tensor.retains_grad
    return tensor is root or not tensor.requires_grad or (root_of(tensor) is root and not hooked)


def _reach(tensor: torch.Tensor) -> int:
    """Elements of memory from the first to the last element of a tensor, both included."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
