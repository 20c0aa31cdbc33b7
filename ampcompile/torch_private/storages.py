"""Private parts of torch that copies of weights depend on: version counters, use counts, `.data`, storages."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
from torch._prims_common import suggest_memory_format
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["FakeTensor", "StorageWeakRef", "is_dense", "suggest_memory_format"]

_DATA: Any = torch._C.TensorBase.data
_SET_DATA = _DATA.__set__
_NOTHING: dict[torch.device, Tensor] = {}

read_data = _DATA.__get__  # `tensor.data` as torch does it
DATA_DOC: str | None = _DATA.__doc__

version = attrgetter("_version")
tensor_address: Callable[[Tensor], int] = attrgetter("_cdata")  # of a tensor's C++ object
# The number of a tensor's owners in C++: its Python object and every backward that saved it.
tensor_users: Callable[[Tensor], int] = torch._C.TensorBase._use_count  # type: ignore[attr-defined]
# A tensor's `storage_key`, without making a Python object of the storage, which would hold it too.
storage_address: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
storage_users = torch._C._storage_Use_Count  # the number of holders of the storage with a `storage_key`
# A weak reference to a tensor's C++ object; unlike Python's, only the last step of `torch.utils.swap_tensors` refuses
# it, which `patches.COPIES` wraps. `expired()` tells whether the tensor was freed.
TensorHandle: Any = torch._C._WeakTensorRef  # type: ignore[attr-defined]

NoTorchFunction = torch._C.DisableTorchFunction  # modes of the user don't see what happens inside
has_memory: Callable[[Tensor], bool] = torch._C._has_storage
address: Any = torch._C._data_address  # type: ignore[attr-defined]  # where a tensor's storage begins; no mode sees it, no copy-on-write ends by it


def storage_key(tensor: Tensor) -> int:
    """The address of the storage's record: no other storage gets it while a `StorageWeakRef` to it exists."""
    return tensor.untyped_storage()._cdata


def is_sole_holder(tensor: Tensor) -> bool:
    """Return True if no other tensor shares a tensor's memory, in a pending backward either; False if it has none."""
    try:
        return storage_users(storage_address(tensor)) == 1
    except RuntimeError:
        return False


def owns_memory(tensor: Tensor) -> bool:
    """Return True if a computed tensor shares memory with no other that is held, as far as that is cheap to tell.

    Autograd knows what a tensor with gradients is a view of; a pending backward may hold the memory.
    """
    try:
        holders = storage_users(storage_address(tensor))
    except RuntimeError:
        return False
    if tensor._base is None:
        return holders == 1 or tensor.grad_fn is not None
    return holders == 2 and getrefcount(tensor._base) == _references_to_unheld_base()


@functools.cache
def _references_to_unheld_base() -> int:
    with torch.inference_mode(False), NoTorchFunction():
        view = torch.empty(1, device="cpu")[0]
    return getrefcount(view._base)


def view_again(view: Tensor, base: Tensor) -> Tensor:
    """The same view of another tensor with the layout of its base: also one of another dtype, or a conjugate."""
    again: Tensor = view._view_func_unsafe(base)  # type: ignore[attr-defined]
    return again


def place(tensor: Tensor) -> tuple[int, int] | None:
    """Return storage and address; None for a tensor without memory of its own: sparse, fake, wrapped by a transform."""
    try:
        return storage_key(tensor), tensor.data_ptr()
    except RuntimeError:
        return None


def write_data(tensor: Tensor, value: Tensor) -> None:
    """`tensor.data = value` as torch does it."""
    _SET_DATA(tensor, value)


_DISCARD = """
#include <c10/core/TensorImpl.h>
extern "C" void discard(c10::TensorImpl* tensor, const char* message) {
  tensor->release_storage_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
}
"""


def discard_memory(tensor: Tensor, message: str) -> None:
    """Let go of a tensor's memory, and of nothing else: whoever reads or writes numbers gets a RuntimeError.

    Its metadata stays, so Dynamo's guards hold. `write_data` gives it memory again.
    """
    memory_discarder()(tensor, message)


@functools.cache
def memory_discarder() -> Callable[[Tensor, str], None]:
    """The function that discards. Builds without CUDA don't export it: there it is compiled at first use (seconds)."""
    if (exported := getattr(torch._C, "_set_storage_access_error_msg", None)) is not None:
        return exported
    from torch._inductor.codecache import CppCodeCache

    folder = Path(torch.__file__).with_name("lib")
    flags = (f"-L{folder}", *(["-Wl,--no-as-needed"] if sys.platform == "linux" else []), "-lc10")
    library: Any = CppCodeCache.load(_DISCARD, extra_flags=flags)
    discard = library.discard
    discard.argtypes, discard.restype = [ctypes.c_void_p, ctypes.c_char_p], None
    return lambda tensor, message: discard(tensor._cdata, message.encode())


class Exported(Tensor):
    """A tensor that a NumPy array or a DLPack capsule holds: while it lives, its memory can be written unseen."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def may_be_in_arrays(tensor: Tensor) -> bool:
    """Return True if a NumPy array may hold a tensor: its storage can't grow then, and nothing in C++ holds it."""
    return type(tensor) is Tensor and not tensor.untyped_storage().resizable() and tensor_users(tensor) == 1


def alias(tensor: Tensor) -> Tensor:
    """`tensor.detach()` below all modes and traces: the same memory and version counter, also if `tensor` moves."""
    return Tensor._make_subclass(Tensor, tensor)


def nothing_on(device: torch.device) -> Tensor:
    """An empty tensor on a device."""
    if (nothing := _NOTHING.get(device)) is None:
        with torch.inference_mode(False), NoTorchFunction():
            nothing = _NOTHING[device] = torch.empty(0, device=device)
    return nothing


def counter_of(tensor: Tensor) -> Tensor | None:
    """Return a tensor that shares the version counter of `tensor` but no memory; None if it has no counter.

    An alias keeps the counter when it is given other data.
    """
    if tensor.is_inference() or tensor.layout != torch.strided:
        return None
    counter = alias(tensor)
    write_data(counter, nothing_on(tensor.device))
    return counter


def same_place(one: Tensor, other: Tensor) -> bool:
    """Return True if two plain tensors show the same elements of the same storage."""
    with NoTorchFunction():
        return (
            address(one) == address(other) and storage_key(one) == storage_key(other) and _layout(one) == _layout(other)
        )


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def current_stream(device: torch.device) -> int:
    """The address of a CUDA device's current stream; ten times cheaper than the stream as an object."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def is_managed_by_fsdp(tensor: Tensor) -> bool:
    """Return True if FSDP gathers this parameter temporarily: its memory and its values come and go unannounced.

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
