"""A weight that FSDP2 gathers: what readers see of it, and who they were.

To all code it is a float32 parameter, before and after the switch to 16 bits. Compiled graphs that round it first read
the rounded numbers, in memory of their own. Every other reader needs float32: before the switch it is noted, and the
weight stays float32; afterwards the numbers aren't there, and the reader gets an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampcompile.dtypes import short_name
from ampcompile.errors import ShardingError
from ampcompile.torch_private import pytree, storages, tracing

STAYS, UNKNOWN, LOW = range(3)
"""A rank's votes; the least counts."""
roots: weakref.WeakSet[Any] = weakref.WeakSet()
"""Each `Root`, for as long as its module lives."""

_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}  # properties that give access to the numbers
_METADATA = {
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "__len__", "__hash__"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
    *("empty_like", "zeros_like", "ones_like"),
}


class GatherRecord(NamedTuple):
    """How one weight is gathered: its name, the dtype, why, and the bytes that a gather saves each rank."""

    weight: str
    gathered_as: str
    because: str
    bytes_saved: int


class Gather:
    """How one weight is gathered, and who reads it. `param` is FSDP's, of `torch_private.fsdp.SwitchableParam`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.param: Any = None
        self.dtype: torch.dtype = torch.float32
        self.kept = ""  # why the user's policy, or FSDP, keeps it in float32
        self.reader = ""  # the first who reads it in float32
        self.rounded_to: set[torch.dtype] = set()  # by compiled graphs
        self.is_low = self.settled = False

    def attach(self, unsharded: nn.Parameter) -> None:
        """Make readers of the unsharded parameter known."""
        if type(unsharded) is not ShardedWeight:
            unsharded.__class__ = ShardedWeight
            unsharded.gathering = self  # type: ignore[attr-defined]

    def vote(self) -> int:
        """Return what this rank knows: the weight stays float32, or may be gathered in 16 bits from now on."""
        if self.kept or self.reader or self.rounded_to - {self.dtype}:
            return STAYS
        busy = torch.is_inference_mode_enabled() or not self.param.idle()
        return LOW if self.rounded_to and not busy else UNKNOWN

    def settle(self, vote: int) -> None:
        """Do what all ranks have agreed on."""
        self.settled = vote != UNKNOWN
        if vote == LOW:
            self.param.switch(self.dtype)
            self.is_low = True
        elif vote == STAYS and not (self.kept or self.reader or self.rounded_to - {self.dtype}):
            self.reader = "another rank"

    def widen(self) -> None:
        """Gather in float32 again. Raises ShardingError if the weight is in use."""
        if self.is_low and not self.param.idle():
            raise ShardingError(
                f"found {self.name} in use, expected no forward or backward under way: call ampcompile.shard_policy "
                "between steps, after backward or before the first forward."
            )
        if self.is_low:
            self.param.switch(None)
        self.is_low = self.settled = False

    def read_in_float32(self, reader: str) -> None:
        """Note a reader that needs the weight in float32. Raises ShardingError if it isn't there."""
        self.reader = self.reader or reader
        if self.is_low:
            raise ShardingError(
                f"found {self.name} gathered in {short_name(self.dtype)}, because only compiled graphs that round it "
                f"read it so far; expected no reader in float32, as {reader} is. Keep it in float32 from the start, by "
                f"ampcompile.shard_policy(model, policy=ampcompile.Policy(modules=(({self.module!r}, 'fp32'),))). "
                "Between steps, ampcompile.shard_policy(model, dtype=torch.float32) takes all back to float32."
            )

    def rounded_numbers(self, unsharded: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in 16 bits, for a compiled graph."""
        self.rounded_to.add(dtype)
        if self.is_low and dtype != self.dtype:
            self.read_in_float32(f"a compiled graph that rounds it to {short_name(dtype)}")
        if self.is_low or not (self.reader or self.rounded_to - {dtype}):
            return self.param.low_numbers(dtype)
        with torch.no_grad(), storages.NoTorchFunction():  # whoever else reads it may write it
            return unsharded.detach().to(dtype)

    @property
    def module(self) -> str:
        """The path of the weight's module."""
        return self.name.rpartition(".")[0]

    def record(self) -> GatherRecord:
        """Return how the weight is gathered now."""
        if self.is_low:
            size = self.param._orig_size.numel() * (torch.float32.itemsize - self.dtype.itemsize)
            return GatherRecord(self.name, short_name(self.dtype), "compiled graphs round it before they read it", size)
        because = self.kept or (f"read in float32 by {self.reader}" if self.reader else "no graph has read it yet")
        if not self.kept and not self.reader and self.rounded_to:
            others = ", ".join(sorted(map(short_name, self.rounded_to - {self.dtype})))
            because = f"compiled graphs round it to {others}" if others else "the ranks haven't agreed yet"
        return GatherRecord(self.name, "f32", because, 0)


class ShardedWeight(nn.Parameter):
    """A weight while it is gathered. Metadata is free; who reads its numbers in eager code is noted by `gathering`."""

    gathering: Gather

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function on the plain tensor, after telling `gathering` of readers."""
        if _reads_numbers(func) and not tracing.is_compiling():
            for value in pytree.arg_tree_leaves(*args, **(kwargs or {})):
                if type(value) is ShardedWeight:
                    value.gathering.read_in_float32(f"{_name(func)} in eager code")
        with storages.NoTorchFunction():
            return func(*args, **(kwargs or {}))


def _reads_numbers(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute(func) in _VALUES
    return name not in _METADATA


def _name(func: Any) -> str:
    name = getattr(func, "__name__", repr(func))
    return _attribute(func) if name in ("__get__", "__set__") else name


def _attribute(accessor: Any) -> str:
    return getattr(accessor.__self__, "__name__", "data")  # our own property has no name


def gathers_of(module: Any) -> list[GatherRecord]:
    """How the weights inside a module, or a bound method's module, are gathered; empty without a shard policy."""
    module = getattr(module, "__self__", module)
    modules = set(module.modules()) if roots and isinstance(module, nn.Module) else ()
    return [gather.record() for root in roots if root.module in modules for gather in root.gathers]
