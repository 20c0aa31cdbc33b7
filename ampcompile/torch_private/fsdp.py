"""FSDP2's parameters: how each is gathered, and in which dtype. All private."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState, alloc_storage

from . import storages

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}


class SwitchableParam(FSDPParam):
    """A parameter of FSDP2 whose gathers can be switched between its own dtype and a 16-bit one, `low`.

    The parameter that modules get, the unsharded one, keeps its dtype. While gathers are in 16 bits it has no memory,
    so that nobody reads rounded numbers from it: they are in `low_numbers`. `attach` is called with the unsharded
    parameter after each gather.
    """

    attach: Callable[[nn.Parameter], None]
    group: Any
    low: torch.dtype | None
    numbers: Tensor | None
    """The unsharded numbers in 16 bits."""
    outputs: dict[torch.dtype | None, list[Tensor]]
    """Memory for gathers in the dtypes that aren't gathered in now."""

    @classmethod
    def adopt(cls, param: Any, group: Any, attach: Callable[[nn.Parameter], None]) -> SwitchableParam:
        """Make one of FSDP's parameters switchable."""
        param.__class__ = cls
        param.group, param.attach, param.low, param.numbers, param.outputs = group, attach, None, None, {}
        if hasattr(param, "_unsharded_param"):
            attach(param._unsharded_param)
        return param

    def init_dtype_attrs(self, mp_policy: Any) -> None:
        """Called by FSDP before its first gather, and before those that the user asks for."""
        super().init_dtype_attrs(mp_policy)
        self.param_dtype = self.low

    def init_unsharded_param(self) -> None:
        """Called by FSDP when it has gathered."""
        super().init_unsharded_param()
        self.attach(self._unsharded_param)
        with torch.inference_mode(False), torch.no_grad():
            if self.low is None:
                if self.numbers is not None:
                    self._fill(self.numbers)
            elif self.numbers is None or not _share(self.numbers, self.all_gather_outputs[0]):
                self.numbers = self._shaped(self.all_gather_outputs[0])

    def low_numbers(self, dtype: torch.dtype) -> Tensor:
        """The unsharded numbers in a 16-bit dtype, in memory that FSDP frees and fills along with the parameter's."""
        if self.numbers is None:
            with torch.inference_mode(False), torch.no_grad():
                device = self.all_gather_outputs[0].device
                self.numbers = torch.empty(self._orig_size, dtype=dtype, device=device)
                self._unsharded_inner_tensors.append(self.numbers)
                self._fill(self.numbers)
        return self.numbers

    def _fill(self, numbers: Tensor) -> None:
        alloc_storage(numbers)
        with torch.autograd._unsafe_preserve_version_counter(numbers):  # it is what a backward has saved
            numbers.copy_(self._shaped(self.all_gather_outputs[0]))

    def _shaped(self, output: Tensor) -> Tensor:
        return output.as_strided(self._orig_size, self._contiguous_orig_stride, storage_offset=0)

    def to_sharded_post_forward(self) -> None:
        """Called by FSDP to shard over fewer ranks until backward: modules get the float32 shards meanwhile."""
        super().to_sharded_post_forward()
        if self.low is not None:
            self._setattr_on_modules(self.sharded_param)

    def idle(self) -> bool:
        """Return True if the parameter is sharded, no gather is under way, and no backward waits for its numbers."""
        if self.sharded_state != ShardedState.SHARDED or self.group._all_gather_result is not None:
            return False
        if self.low is None and any(_holders(output) > 2 for output in self.all_gather_outputs):
            return False
        if self.numbers is None:
            return True
        # A backward holds the tensor itself, or a view of it.
        users, unused = storages.tensor_users(self.numbers), storages.tensor_users(torch.empty(0, device="cpu"))
        return users == unused and _holders(self.numbers) == (1 if self.low is None else 2)

    def switch(self, dtype: torch.dtype | None) -> None:
        """Gather in a 16-bit dtype from now on, or in the parameter's own: None. Only while it is idle."""
        self.outputs[self.low] = self.all_gather_outputs
        self.all_gather_outputs = self.outputs.pop(dtype, [])
        self.low = self.param_dtype = dtype
        self.numbers, self._unsharded_inner_tensors = None, []

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all ranks that have a shard or a replica of it."""
        return self.mesh_info.mesh


def _share(one: Tensor, other: Tensor) -> bool:
    return storages.storage_address(one) == storages.storage_address(other)


def _holders(tensor: Tensor) -> int:
    """The number of tensors on a tensor's storage."""
    fresh = torch.empty(0, device=tensor.device)
    storage, other = tensor.untyped_storage(), fresh.untyped_storage()  # both have a Python object now
    return 1 + storages.storage_users(storage._cdata) - storages.storage_users(other._cdata)


def roots(module: nn.Module) -> list[nn.Module]:
    """The modules given to `fully_shard` that no other such module contains."""
    if isinstance(module, FSDPModule):
        return [module]
    return list(dict.fromkeys(root for child in module.children() for root in roots(child)))


def reshard(root: nn.Module) -> None:
    """Free what is unsharded, as after an evaluation; a backward under way gathers it again."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def at_rest(root: Any) -> bool:
    """Return True between forward and backward of a root; False inside them."""
    return root._get_fsdp_state()._training_state == TrainingState.IDLE


def params_of(root: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each parameter that FSDP manages in a root, the parameter and its group."""
    names, seen = {module: name for name, module in root.named_modules()}, set()
    for module in names:
        state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        # 2.11 has one group of parameters for each module, later versions a list.
        for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
            if group is not None and id(group) not in seen:
                seen.add(id(group))
                for param in group.fsdp_params:
                    info = param._module_info
                    path = [*names[info.module].split("."), info.param_name]
                    yield ".".join(part for part in path if part and part not in _WRAPPERS), param, group


def why_not(param: Any) -> str:
    """Return why a parameter can't be switched, or empty text."""
    if not isinstance(param, FSDPParam) or getattr(param, "is_spmd_types", False):
        return "FSDP handles it in a way of its own"
    if param.sharded_param.dtype != torch.float32:
        return f"its shards are {param.sharded_param.dtype}"
    if param.mp_policy.param_dtype not in (None, torch.float32):
        return "FSDP's own MixedPrecisionPolicy decides"
    if param.is_dtensor:
        return "it is a DTensor before FSDP shards it"
    if param.offload_to_cpu:
        return "its shards are on the CPU"
    if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
        return "its class has gathers of its own"
    return "" if getattr(param.mesh_info, "shard_mesh_size", 1) > 1 else "there is nothing to gather"
