"""A weight that FSDP2 gathers: what readers see of it, and who they were.

To all code it is a float32 parameter, whatever it is gathered in. Compiled graphs that round it first read the rounded
numbers, in memory of their own. Every other reader needs float32: at first it is noted, and the weight stays float32;
where it is gathered in 16 bits the numbers aren't there, and the reader gets an error.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampcompile.dtypes import short_name
from ampcompile.errors import UnsupportedError
from ampcompile.torch_private import pytree, storages, tracing
from ampcompile.torch_private.storages import Living
from ampcompile.weights.spec import Form

roots: Living[Any] = Living()
"""Each `Root`, for as long as its module lives."""

_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}  # properties that give access to the numbers
_METADATA = {
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "__len__", "__hash__"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
    *("empty_like", "zeros_like", "ones_like"),
    "fp8_linear.default",  # which reads quantized parts, and the weight's shape; backward may compute it again
}


class GatherRecord(NamedTuple):
    """How one weight is gathered: its name, the dtype, why, and the bytes that a gather saves each rank."""

    weight: str
    gathered_as: str
    because: str
    bytes_saved: int


class Gather:
    """How one weight is gathered, and who reads it. `param`: its `torch_private.fsdp.GatheredParam`."""

    def __init__(self, name: str, param: Any) -> None:
        self.name, self.param = name, param
        self.module = name.rpartition(".")[0]  # its path
        self.wide = param.weight.dtype
        self.lasting = ""  # a reader that tells of itself only once
        self.narrow = self.wide  # the dtype of fewer bits in which it was last gathered
        self.forget(self.wide, True)
        param.weight.__class__ = ShardedWeight
        param.weight.gathering = self

    def forget(self, dtype: torch.dtype, fp8: bool, kept: str = "") -> None:
        """Forget all readers but another backend's graph, and gather the weight in its own dtype until `decide`."""
        self.dtype, self.kept, self.decided = dtype, kept, False  # `kept`: why `shard_policy` keeps it so
        self.fp8, self.unquantized = fp8, ""  # whether a graph may quantize it, and why one that was asked to doesn't
        self.reader = self.lasting  # the first who reads it unrounded
        self.rounded_to: set[torch.dtype] = set()  # by compiled graphs

    @property
    def is_low(self) -> bool:
        """True if its own numbers aren't there, or won't be after the next gather."""
        return bool(self.param.is_low or self.param.low)

    def may_be(self, dtype: torch.dtype) -> bool:
        """Return True if compiled graphs read it, and all readers on this rank round it to `dtype`, of 16 or 8 bits."""
        wanted = dtype == self.dtype or (self.fp8 and dtype.itemsize == 1)
        return wanted and self.rounded_to == {dtype} and not (self.kept or self.reader or self.param.is_saved)

    def decide(self, low: torch.dtype | None) -> None:
        """Do what all ranks have agreed on, from the next gather on."""
        self.decided, self.param.low, self.narrow = True, low, low or self.narrow

    def read_whole(self, reader: str) -> None:
        """Note a reader that needs the weight unrounded. Raises UnsupportedError if it isn't there."""
        self.reader = self.reader or reader
        if self.is_low:
            raise UnsupportedError(
                f"found {self.name} gathered in {_name(self.narrow)}, because only compiled graphs that round it read "
                f"it in the first forward; expected no reader in {self.wide}, as {reader} is. Keep it so by "
                f"ampcompile.shard_policy(model, policy=ampcompile.Policy(modules=(({self.module!r}, 'fp32'),))), from "
                "the start or between steps."
            )

    def rounded_numbers(self, form: Form, unquantized: str = "", quantized: dict[Any, Any] | None = None) -> Tensor:
        """The weight in 16 bits, or a part of it quantized, for a compiled graph. `unquantized`: see `CopySpec`.

        `quantized`: parts of weights that this call of the graph has quantized for itself, as others may write them.
        """
        dtype = form.dtype
        self.rounded_to.add(dtype)
        self.unquantized = self.unquantized or unquantized
        if self.is_low and dtype != self.narrow:
            self.read_whole(f"a compiled graph that rounds it to {_name(dtype)}")
        fp8: Any = None
        if dtype.itemsize == 1:
            from ampcompile.kernels import fp8  # defines ops that few need
        if self.is_low or not (self.reader or self.rounded_to - {dtype}):
            return self.param.low_numbers(form, fp8)
        with torch.no_grad(), storages.NoTorchFunction():  # whoever else reads it may write it
            wide = self.param.weight.detach()
            if fp8 is None:
                return wide.to(dtype)
            quantized = {} if quantized is None else quantized
            if self not in quantized:
                quantized[self] = fp8.quantized_parts(wide)
            part: Tensor = quantized[self][form.part]
            return part

    def record(self) -> GatherRecord:
        """Return how the weight is gathered from the next gather on."""
        if low := self.param.low:
            size = self.param.weight.numel() * (self.wide.itemsize - low.itemsize)
            because = "compiled graphs round it before they read it"
            because = "compiled graphs multiply it in fp8" if low.itemsize == 1 else because
            because += f"; not in fp8: {self.unquantized}" if self.unquantized else ""
            return GatherRecord(self.name, _name(low), because, size)
        because = "it is decided when the second forward starts"
        if self.kept or self.reader:
            because = self.kept or f"read in {self.wide} by {self.reader}"
        elif self.rounded_to and not any(map(self.may_be, self.rounded_to)):
            because = f"compiled graphs round it to {', '.join(sorted(map(_name, self.rounded_to)))}"
        elif self.decided:
            because = "in the first forward, some rank read it in another type or not at all"
        return GatherRecord(self.name, _name(self.wide), because, 0)


def _name(dtype: torch.dtype) -> str:
    return short_name(dtype).partition("_")[0]


class ShardedWeight(nn.Parameter):
    """A weight while it is gathered. Metadata is free; who reads its numbers in eager code is noted by `gathering`."""

    gathering: Gather

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function on the plain tensor, after telling `gathering` of readers."""
        if (reader := _reader(func)) and not tracing.is_compiling():
            for value in pytree.arg_tree_leaves(*args, **(kwargs or {})):
                if type(value) is ShardedWeight:
                    value.gathering.read_whole(f"{reader} in eager code")
        with storages.NoTorchFunction():
            return func(*args, **(kwargs or {}))


def _reader(func: Any) -> str:
    """The name of a function that reads numbers; empty of others."""
    name = getattr(func, "__name__", repr(func))
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(func.__self__, "__name__", "data")  # our own property has no name
        return attribute if attribute in _VALUES else ""
    return "" if name in _METADATA else name


def gathers_of(module: Any) -> list[GatherRecord]:
    """How the weights inside a module, or a bound method's module, are gathered; empty without a shard policy."""
    module = getattr(module, "__self__", module)
    modules = set(module.modules()) if roots and isinstance(module, nn.Module) else ()
    return [record for root in roots if root.module in modules for record in root.records()]
