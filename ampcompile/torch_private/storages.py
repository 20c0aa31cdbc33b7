"""Private parts of torch that copies of weights depend on: version counters, `.data`, storages."""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
from torch._prims_common import suggest_memory_format
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["FakeTensor", "StorageWeakRef", "is_dense", "suggest_memory_format"]

T = TypeVar("T")
_DATA: Any = torch._C.TensorBase.data

read_data, write_data = _DATA.__get__, _DATA.__set__  # `tensor.data` as torch does it
DATA_DOC: str | None = _DATA.__doc__
untyped_storage: Callable[[Tensor], torch.UntypedStorage] = Tensor.untyped_storage  # as torch does it

version = attrgetter("_version")
tensor_address: Callable[[Tensor], int] = attrgetter("_cdata")  # of a tensor's C++ object
# A tensor's `storage_key`, without making a Python object of the storage, which would hold it too.
storage_address: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]

NoTorchFunction = torch._C.DisableTorchFunction  # modes of the user don't see what happens inside


def storage_key(tensor: Tensor) -> int:
    """The address of the storage's record: no other storage gets it while a `StorageWeakRef` to it exists."""
    return untyped_storage(tensor)._cdata


def alias(tensor: Tensor) -> Tensor:
    """`tensor.detach()` below all modes and traces: the same memory and version counter, also if `tensor` moves."""
    return Tensor._make_subclass(Tensor, tensor)


def has_counter(tensor: Tensor) -> bool:
    """Return True for a plain tensor, no negated view, of which every write raises a version counter."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return plain and not (tensor.is_inference() or tensor.is_neg())


def current_stream(device: torch.device) -> int:
    """The address of a CUDA device's current stream; ten times cheaper than the stream as an object."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def gathered_by_fsdp() -> dict[int, Tensor]:
    """The parameters that FSDP2 gathers now, by their ids. 2.11 has one group of them per module, later ones a list."""
    registry: Any = sys.modules.get("torch.distributed._composable_state")
    states = [reference() for reference in list(registry._module_state_mapping.values())] if registry else []
    listed = [getattr(s, "_fsdp_param_groups", None) or [getattr(s, "_fsdp_param_group", None)] for s in states]
    params = [param for groups in listed for group in filter(None, groups) for param in group.fsdp_params]
    return {id(found): found for param in params if (found := getattr(param, "_unsharded_param", None)) is not None}


def is_managed_by_fsdp(tensor: Tensor, gathered: Mapping[int, Tensor]) -> bool:
    """Return True if FSDP gathers this parameter temporarily: its memory and its values come and go unannounced.

    `gathered`: see `gathered_by_fsdp`. FSDP1 marks its parameters.
    """
    return id(tensor) in gathered or getattr(tensor, "_fsdp_flattened", False)


class Living(weakref.WeakSet[T]):
    """A weak set that may be walked while a collector or another thread changes it: its references are listed first."""

    def __iter__(self) -> Iterator[T]:
        references: list[weakref.ref[T]] = list(self.data)  # type: ignore[attr-defined]
        return iter([each for reference in references if (each := reference()) is not None])
