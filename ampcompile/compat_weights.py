"""What the copies of weights rest on in torch's private parts: version counters, use counts, `.data`, storages."""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["FakeTensor", "StorageWeakRef", "is_dense"]

_DATA: Any = torch._C.TensorBase.data
_NOTHING: dict[str, Tensor] = {}

version = attrgetter("_version")
# Of a `StorageWeakRef.cdata`: whether it was freed; the storage, held, or None; how many hold it.
storage_is_gone = torch.UntypedStorage._expired
hold_storage = torch.UntypedStorage._new_with_weak_ptr
storage_users = torch._C._storage_Use_Count


NoTorchFunction = torch._C.DisableTorchFunction  # modes of the user don't see what happens inside


def storage_key(tensor: Tensor) -> int:
    """The address of the storage's record: no other storage gets it while a `StorageWeakRef` to it exists."""
    return tensor.untyped_storage()._cdata


def place(tensor: Tensor) -> tuple[int, int] | None:
    """Storage and address; None for a tensor without memory of its own: sparse, fake, wrapped by a transform."""
    try:
        return storage_key(tensor), tensor.data_ptr()
    except RuntimeError:
        return None


def tensor_users(tensor: Tensor) -> int:
    """How many own a tensor in C++: Python's object, and whoever saved it."""
    return tensor._use_count()  # type: ignore[attr-defined]


def read_data(tensor: Tensor) -> Tensor:
    """`tensor.data` as torch does it."""
    return _DATA.__get__(tensor)


def write_data(tensor: Tensor, value: Tensor) -> None:
    """`tensor.data = value` as torch does it."""
    _DATA.__set__(tensor, value)


def alias(tensor: Tensor) -> Tensor:
    """`tensor.detach()` below all modes and traces: the same memory and version counter, whatever becomes of it."""
    return Tensor._make_subclass(Tensor, tensor)


def counter_of(tensor: Tensor) -> Tensor | None:
    """A tensor that shares the version counter of `tensor` but no memory; None where a tensor has none.

    An alias keeps the counter when it is given other data.
    """
    if tensor.is_inference() or tensor.layout != torch.strided:
        return None
    device = tensor.device.type
    if device not in _NOTHING:
        with torch.inference_mode(False):
            _NOTHING[device] = torch.empty(0, device=device)
    try:
        counter = alias(tensor)
        write_data(counter, _NOTHING[device])
    except RuntimeError:  # fake, or wrapped by a transform: memory that no compiled graph keeps a copy of
        return None
    return counter


def current_stream(device: torch.device) -> int:
    """The address of a CUDA device's current stream; ten times cheaper than the stream as an object."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def is_managed_by_fsdp(tensor: Tensor) -> bool:
    """Whether FSDP gathers this parameter for a while: its memory and its values come and go unannounced.

    FSDP1 marks its parameters. FSDP2 doesn't; 2.11 has one group of parameters per module, later versions a list.
    """
    if getattr(tensor, "_fsdp_flattened", False):
        return True
    registry: Any = sys.modules.get("torch.distributed._composable_state")
    for reference in list(registry._module_state_mapping.values()) if registry else ():
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in filter(None, groups):
            if any(getattr(param, "_unsharded_param", None) is tensor for param in group.fsdp_params):
                return True
    return False
