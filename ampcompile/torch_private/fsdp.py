"""FSDP2's parameters, and the extension points that let a local shard say what is gathered of it.

`fsdp_pre_all_gather` and `fsdp_post_all_gather` are FSDP2's public protocol. It looks them up on each local shard, so
they can be attributes of a plain tensor, and optimizers and checkpoints see plain float32 shards. Memory that switches
between two dtypes, and the parameter that modules get, have no public door.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .optimizers import plain_name
from .storages import StorageWeakRef, untyped_storage


class GatheredParam:
    """A parameter of FSDP2, gathered in its own dtype, or in one of 16 or 8 bits: in `low`, from the next gather on.

    `weight`, the unsharded parameter that modules get, keeps its dtype. While gathers are in fewer bits it has no
    memory, so that nobody reads rounded numbers from it: they are in `low_numbers`, the same after any gather. Those of
    8 bits are scaled by the magnitude of the whole weight, see `tail`. `together`: in a root's forward, all weights of
    the root that are gathered so, which the first gather measures for the forward and its backward; else None.
    """

    def __init__(self, param: Any, group: Any) -> None:
        if not param.all_gather_outputs:  # nothing has been gathered yet: do what FSDP does then
            size, ranks = param.padded_sharded_param_size.numel(), param.mesh_info.shard_mesh_size
            with torch.inference_mode(False):
                param.init_dtype_attrs(param.mp_policy)
                param.init_all_gather_outputs([size], [param.sharded_param.dtype], ranks, param.device)
                param.init_unsharded_param()
            param.free_unsharded_param()
        self.param, self.device, self.process_group = param, param.device, param.mesh_info.shard_process_group
        self.group = group
        self.weight: nn.Parameter = param.unsharded_param
        self.low: torch.dtype | None = None
        self.is_low = False  # what the last gather left in memory is in fewer bits
        self.numbers: tuple[Tensor, ...] | None = None  # in 16 bits, in the memory `_narrow`; or the parts of fp8
        self._narrow: Any = None
        self._other: Any = None
        self._saved: list[tuple[StorageWeakRef, Tensor, Any, int]] = []  # by backwards, before `forget`
        self.forget()
        self.together: Sequence[GatheredParam] | None = None
        self._wide: Tensor = param.all_gather_outputs[0]
        self._wide_numbers = self.weight.detach()
        torch._dynamo.mark_static(self.weight)  # as Dynamo does with parameters of no other class
        self.attach()
        param._init_extensions()  # FSDP's own call is before its first forward

    def forget(self) -> None:
        """Have low numbers made anew, in any type; those that backwards have saved are filled for as long as they are.

        The weight isn't gathered now.
        """
        if self.numbers is not None:
            made = [self._narrow, *self.numbers[1:2]]
            inner = self.param._unsharded_inner_tensors
            self.param._unsharded_inner_tensors = [t for t in inner if all(t is not each for each in made)]
            for part, numbers in enumerate(self.numbers[:2]):
                memory, like = StorageWeakRef(untyped_storage(numbers)), numbers.to("meta")
                self._saved.append((memory, like, self.quantizing, part))
        self.numbers = self._narrow = self._other = None
        self._turned = False  # forward reads the transposed matrix
        self.quantizing: Any = None  # `ampcompile.kernels.fp8`, where they are quantized
        self.tail = torch.empty(0, dtype=torch.float32, device="cpu")  # scale and magnitude
        self.measured = False  # in this forward

    @property
    def is_saved(self) -> bool:
        """True if a backward holds numbers from before `forget`: they need the weight in its own dtype."""
        self._saved = [saved for saved in self._saved if not saved[0].expired()]
        return bool(self._saved)

    def attach(self) -> None:
        """Say what is gathered of the local shard, which `_apply` and `load_state_dict(assign=True)` replace."""
        shard = self.param.sharded_param._local_tensor
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = self.before_gather, self.after_gather

    def before_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor], None]:
        """FSDP's `fsdp_pre_all_gather`: return the padded shard as it is sent, and point FSDP to memory for all."""
        self.is_low = self.low is not None
        self.param.all_gather_outputs = [self._narrow if self.is_low else self._wide]
        shard = self.shard()
        if self.low is None:
            return (shard,), None
        if self.quantizing is None:
            return (shard.to(self.low),), None
        if not self.measured or (self.together is None and not _in_backward()):
            measure(self.together or [self])
        return (self.quantizing.quantize_shard(shard, self.tail),), None

    def after_gather(self, outputs: Any, metadata: None, dtype: torch.dtype, *, out: Any = None) -> None:
        """FSDP's `fsdp_post_all_gather`."""
        if self.numbers is not None and not (self.is_low and self.quantizing is None):
            self._fill(self.numbers)
        for memory, like, quantizing, part in self._saved if self.is_saved and not self.is_low else ():
            if (storage := torch.UntypedStorage._new_with_weak_ptr(memory.cdata)) is not None:
                wide, size = self._wide_numbers, untyped_storage(like).nbytes()
                storage.resize_(size)
                numbers = torch.empty(0, dtype=like.dtype, device=wide.device).set_(
                    storage, 0, like.shape, like.stride()
                )
                numbers.copy_(wide if quantizing is None else quantizing.quantized_parts(wide)[part])

    def shard(self) -> Tensor:
        """This rank's shard, padded."""
        return self.param._sharded_param_data.view(self.param.padded_sharded_param_size)

    def low_numbers(self, form: Any, quantizing: Any = None) -> Tensor:
        """The unsharded numbers in the dtype of the first `Form` asked for, which FSDP frees along with the weight.

        `quantizing`: the module `ampcompile.kernels.fp8`, for a dtype of 8 bits.
        """
        if self.numbers is None:
            wide, self.quantizing = self._wide_numbers, quantizing
            with torch.inference_mode(False):
                self._narrow = torch.empty_like(self._wide, dtype=torch.uint8 if quantizing else form.dtype)
                if quantizing is None:
                    self.numbers = (self._narrow.as_strided(wide.size(), wide.stride()),)
                else:
                    _, self._other, tail = quantizing.parts_like(wide)
                    plain = self._narrow[: wide.numel()].view(quantizing.E4M3).view(wide.shape)
                    self.numbers = plain, self._other, tail
                    self.param._unsharded_inner_tensors.append(self._other)
            self.param._unsharded_inner_tensors.append(self._narrow)
            self._fill(self.numbers)
        if form.turned and not self._turned:
            self._turned = True
            self._fill(self.numbers)
        return self.numbers[form.part or 0]

    def _fill(self, numbers: tuple[Tensor, ...]) -> None:
        # A backward may have saved them.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(numbers):
            if self.quantizing is None:
                numbers[0].copy_(self._wide_numbers)
            elif not self.is_low:
                for mine, made in zip(numbers, self.quantizing.quantized_parts(self._wide_numbers), strict=True):
                    mine.copy_(made)
            else:
                numbers[2].copy_(self.tail)
                if self.tail.is_cuda:
                    self.tail.record_stream(torch.cuda.current_stream())  # it was made on the stream of gathers
                storage, size = self._other.untyped_storage(), self._other.numel()
                size = 0 if self._is_freed_after_forward() and not self._turned else size
                if storage.size() != size:
                    storage.resize_(size)
                if size:
                    numbers[1].copy_(numbers[0].t())

    def _is_freed_after_forward(self) -> bool:
        """True in a forward after which FSDP frees the weight: backward's matrix isn't needed yet."""
        group = self.group
        running = group._training_state.name == "FORWARD" and not _in_backward()
        return bool(running and group._reshard_after_forward and len(group.modules) == 1)

    def __getstate__(self) -> None:
        """Nothing: FSDP gathers no copy of a shard, and none that is loaded."""


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def measure(params: Sequence[GatheredParam]) -> None:
    """Take the magnitudes of whole weights, over all ranks with shards: one collective for each group of ranks."""
    by_group: defaultdict[Any, list[GatheredParam]] = defaultdict(list)
    for param in params:
        by_group[param.process_group].append(param)
    for group, members in by_group.items():
        with torch.no_grad():
            magnitudes = torch.stack([param.quantizing.largest_in(param.shard()) for param in members])
            dist.all_reduce(magnitudes, dist.ReduceOp.MAX, group=group)
            tails = members[0].quantizing.tail_of(magnitudes)
        for param, tail in zip(members, tails, strict=True):
            param.tail, param.measured = tail, True


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


def params_of(root: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each parameter that FSDP manages in a root, the parameter, and its group."""
    names, seen = {module: name for name, module in root.named_modules()}, set()
    for module in names:
        state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        # 2.11 has one group of parameters for each module, later versions a list.
        for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
            if group is not None and id(group) not in seen:
                seen.add(id(group))
                for param in group.fsdp_params:
                    info = param._module_info
                    path = filter(None, (plain_name(names[info.module]), info.param_name))
                    yield ".".join(path), param, group


def why_not(param: Any) -> str:
    """Return why a parameter can't be gathered in fewer bits, or empty text."""
    if getattr(param, "is_spmd_types", False):
        return "FSDP handles it in a way of its own"
    if (dtype := param.sharded_param.dtype) not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its shards are {dtype}"
    if param.mp_policy.param_dtype not in (None, dtype):
        return "FSDP's own MixedPrecisionPolicy decides"
    if param.is_dtensor:
        return "it is a DTensor before FSDP shards it"
    if param.offload_to_cpu:
        return "its shards are on the CPU"
    if param.post_forward_mesh_info not in (None, param.mesh_info):
        return "reshard_after_forward is a number of ranks"
    if hasattr(param.sharded_param._local_tensor, "fsdp_pre_all_gather"):
        return "its class has gathers of its own"
    return "" if getattr(param.mesh_info, "shard_mesh_size", 1) > 1 else "there is nothing to gather"
