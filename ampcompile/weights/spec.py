"""The copies of weights that graphs want: of which weight, in which format; and which tensors can have a copy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampcompile.kernels.packed_conv import Blocks
from ampcompile.torch_private import storages

_CLASSES = (Tensor, torch.nn.Parameter, storages.FakeTensor)


class Form(NamedTuple):
    """The format of a copy: values rounded to `dtype`, held in it or, if `wide`, as float32.

    Of an 8-bit type: quantized, in a buffer as `kernels/fp8.py` describes it; `by_rows`: with a scale for each row. Of
    a weight that FSDP gathers, the `part` of this index in `parts_like` there; `turned`: forward reads the transposed
    matrix.
    """

    dtype: torch.dtype
    wide: bool = False
    by_rows: bool = False
    part: int | None = None
    turned: bool = False

    @property
    def quantized(self) -> bool:
        """True if the numbers are scaled, and lie in a buffer together with the scale."""
        return self.dtype.itemsize == 1

    def empty_like(self, weight: Tensor) -> Tensor:
        """An uninitialized buffer for a copy of `weight`, in its strides."""
        if self.quantized:
            from ampcompile.kernels import fp8  # defines ops that few need

            if self.part is not None:
                return fp8.parts_like(weight)[self.part]
            return fp8.buffer_like(weight, self.by_rows)
        held = torch.float32 if self.wide else self.dtype
        return torch.empty_like(weight, dtype=held, requires_grad=False)


@dataclass(frozen=True)
class CopySpec:
    """A copy that a graph reads as an input: the pass that hoists a cast wants it, a `Binding` keeps it up to date."""

    weight: int
    """The index of the weight among the graph's inputs."""
    form: Form
    blocks: Blocks | None = None
    """The blocks it is packed in once that pays; None: strided as the weight."""
    trial: bool = False
    """True if the tensor is neither a parameter nor a registered buffer: its copy is kept only after the tensor has
    stayed the same for some calls."""
    gathered: bool = False
    """True if the copy isn't kept: FSDP gathers the weight for each call, and its low-precision numbers with it."""
    unquantized: str = ""
    """Of such a weight: why a product that was to read it in fp8 doesn't."""

    def empty_like(self, weight: Tensor) -> Tensor:
        """An uninitialized tensor as the graph is traced with it, for a fake weight too."""
        copy = self.form.empty_like(weight)
        return copy if self.blocks is None else copy.contiguous()  # an opaque tensor has no strides


def hoistable(tensor: Any, gathered: Mapping[int, Tensor]) -> bool:
    """Return True if copies of a weight can be kept across calls; if not, it is cast in the graph.

    It must be dense, on a CPU or CUDA device, of no subclass, have a version counter (inference tensors have none),
    and not be a parameter that FSDP gathers temporarily; `gathered`: see `storages.gathered_by_fsdp`.
    """
    return (
        type(tensor) in _CLASSES
        and tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and tensor.is_floating_point()
        and storages.is_dense(tensor)
        and not tensor.is_inference()
        and not storages.is_managed_by_fsdp(tensor, gathered)
    )


def hoistable_parameters(inputs: Sequence[Any]) -> list[int]:
    """Return the indices of the parameters of which copies can be kept; of a DTensor, of this rank's part."""
    gathered = storages.gathered_by_fsdp()
    given = {i: value for i, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter)}
    parts = {i: storages.local_part(v) if storages.has_plain_part(v) else v for i, v in given.items()}
    kept = (i for i, value in given.items() if not storages.is_managed_by_fsdp(value, gathered))
    return [i for i in kept if hoistable(parts[i], gathered)]
