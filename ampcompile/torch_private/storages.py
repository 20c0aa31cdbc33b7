"""Version counters, `.data`, storages, which tensors share memory, and what of sharded ones is here. All private."""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from sys import getrefcount
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functionaltensor, is_functorch_wrapped_tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
from torch._prims_common import suggest_memory_format
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .own_thread import made_once

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
_count_holders: Callable[[int], int] = torch._C._storage_Use_Count

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


def parts_of(value: Any) -> list[Any]:
    """Return the values that AOTAutograd unwraps an argument into: a tensor subclass's parts, else the value itself.

    Parts are tensors, and from 2.13 on also what describes them, such as the mesh of a DTensor.
    """
    if not isinstance(value, torch.Tensor) or not is_traceable_wrapper_subclass(value):
        return [value]
    return [part for name in value.__tensor_flatten__()[0] for part in parts_of(getattr(value, name))]


def memory_of(value: Any) -> Any:
    """Return a key that is equal for tensors that share memory, fake ones too; None where that is unknown.

    It is an address: whoever compares keys holds the tensors, or the nodes of these fakes, until then.
    A tensor subclass, or a tensor that a transform of torch.func has wrapped, has the key of the tensors inside.
    """
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    if type(value) not in (Tensor, torch.nn.Parameter) and is_traceable_wrapper_subclass(value):
        parts = [memory_of(part) for part in parts_of(value) if isinstance(part, Tensor)]
        return parts[0] if len(parts) == 1 else tuple(parts)
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:
        return memory_of(get_unwrapped(value)) if is_functorch_wrapped_tensor(value) else None


is_wrapped: Any = is_functorch_wrapped_tensor  # by a transform of torch.func; once that has ended too


def unwrapped(value: Any) -> Any:
    """Return what is in a value that a transform of torch.func has wrapped, which has ended; else the value itself.

    A batch of vmap stays: what is in it has another shape. So does everything while a transform is active.
    """
    if torch._C._are_functorch_transforms_active():
        return value
    while isinstance(value, Tensor) and is_functorch_wrapped_tensor(value) and not is_batchedtensor(value):
        if is_functionaltensor(value):
            torch._sync(value)
        value = get_unwrapped(value)
    return value


def owns_memory(tensor: Tensor) -> bool:
    """Return True if a computed tensor shares memory with no other that is held, as far as that is cheap to tell.

    Autograd knows what a tensor with gradients is a view of; a pending backward may hold the memory.
    """
    try:
        holders = _count_holders(storage_address(tensor))
    except RuntimeError:
        return False
    if tensor._base is None:
        return holders == 1 or tensor.grad_fn is not None
    return holders == 2 and getrefcount(tensor._base) == _references_to_unheld_base()


def own_memory_together(tensors: Sequence[Tensor]) -> set[int]:
    """The ids of those computed tensors that share memory only among themselves, as far as that is cheap to tell."""
    addresses, known = dict[int, int](), set(map(id, tensors))
    members: dict[int, set[int]] = {}
    for tensor in tensors:
        with suppress(RuntimeError):  # it has no storage
            addresses[id(tensor)] = address = storage_address(tensor)
            members.setdefault(address, set()).add(id(tensor))
            unheld = tensor._base is not None and getrefcount(tensor._base) == _references_to_unheld_base()
            if unheld or id(tensor._base) in known:
                members[address].add(id(tensor._base))
    alone = {address for address, each in members.items() if _count_holders(address) == len(each)}
    return {key for key, address in addresses.items() if address in alone}


@made_once
def _references_to_unheld_base() -> int:
    view = torch.empty(1, dtype=torch.float32, device="cpu")[0]
    return getrefcount(view._base)


def view_again(view: Tensor, base: Tensor) -> Tensor:
    """The same view of another tensor with the layout of its base: also one of another dtype, or a conjugate."""
    again: Tensor = view._view_func_unsafe(base)
    return again


def current_stream(device: torch.device) -> int:
    """The address of a CUDA device's current stream; ten times cheaper than the stream as an object."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def include_dtensors(tensors: Sequence[Any]) -> bool:
    """Return True if one of them is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and module.DTensor in map(type, tensors)


def local_part(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, for which `to_local` takes a hundred times as long; others as they are."""
    return getattr(tensor, "_local_tensor", tensor)


def first_row(tensor: Any) -> int | None:
    """Return the row at which this rank's part begins, 0 for a whole tensor; None if other dimensions are cut too."""
    placements = getattr(tensor, "placements", ())
    cut = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    if not cut:
        return 0
    shard, mesh = placements[cut[0]], tensor.device_mesh
    if len(cut) > 1 or type(shard) is not sys.modules["torch.distributed.tensor"].Shard or shard.dim != 0:
        return None
    return min(len(tensor), mesh.get_local_rank(cut[0]) * -(-len(tensor) // mesh.size(cut[0])))


def has_plain_part(tensor: Any) -> bool:
    """Return True for a DTensor whose parts are plain tensors."""
    return include_dtensors([tensor]) and type(tensor._local_tensor) is Tensor


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


def gathered_by_fsdp() -> dict[int, Tensor]:
    """The parameters that FSDP2 gathers now, by their ids. 2.11 has one group of them per module, later ones a list."""
    registry: Any = sys.modules.get("torch.distributed._composable_state")
    states = [reference() for reference in list(registry._module_state_mapping.values())] if registry else []
    listed = [getattr(s, "_fsdp_param_groups", None) or [getattr(s, "_fsdp_param_group", None)] for s in states]
    params = [param for groups in listed for group in filter(None, groups) for param in group.fsdp_params]
    return {
        id(unsharded): unsharded
        for param in params
        if (unsharded := getattr(param, "_unsharded_param", None)) is not None
    }


def is_managed_by_fsdp(tensor: Tensor, gathered: Mapping[int, Tensor]) -> bool:
    """Return True if FSDP gathers this parameter temporarily: its memory and its values come and go unannounced.

    `gathered`: see `gathered_by_fsdp`. FSDP1 marks its parameters.
    """
    return id(tensor) in gathered or getattr(tensor, "_fsdp_flattened", False)


class Living(weakref.WeakSet[T]):
    """A weak set that may be walked while a collector or another thread changes it: its references are listed first."""

    def __iter__(self) -> Iterator[T]:
        references: list[weakref.ref[T]] = list(self.data)  # type: ignore[attr-defined]
        return iter([param for reference in references if (param := reference()) is not None])
