"""Which tensors share memory, as far as torch tells."""

from functools import cache
from sys import getrefcount
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from .compiled_functions import parts_of
from .types import is_traceable_wrapper_subclass

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_address, _users = torch._C._storage_address, torch._C._storage_Use_Count  # type: ignore[attr-defined]


def memory_of(value: Any) -> Any:
    """Return a key that is equal for tensors that share memory, fake ones too; None where that is unknown.

    It is an address: whoever compares keys holds the tensors, or the nodes of these fakes, until then.
    A tensor subclass, or a tensor that a transform of torch.func has wrapped, has the key of the tensors inside.
    """
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    if type(value) not in _PLAIN and is_traceable_wrapper_subclass(value):
        parts = [memory_of(part) for part in parts_of(value) if isinstance(part, torch.Tensor)]
        return parts[0] if len(parts) == 1 else tuple(parts)
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:
        return memory_of(get_unwrapped(value)) if is_functorch_wrapped_tensor(value) else None


def owns_memory(tensor: torch.Tensor) -> bool:
    """Return True if a computed tensor shares memory with no other that is held, as far as that is cheap to tell.

    Autograd knows what a tensor with gradients is a view of; a pending backward may hold the memory.
    """
    try:
        holders = _users(_address(tensor))
    except RuntimeError:
        return False
    if tensor._base is None:
        return holders == 1 or tensor.grad_fn is not None
    return holders == 2 and getrefcount(tensor._base) == _references_to_unheld_base()


@cache
def _references_to_unheld_base() -> int:
    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        view = torch.empty(1, device="cpu")[0]
    return getrefcount(view._base)


def view_again(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The same view of another tensor with the layout of its base: also one of another dtype, or a conjugate."""
    again: torch.Tensor = view._view_func_unsafe(base)
    return again
