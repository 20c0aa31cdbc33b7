"""Decide which products of 16-bit operands a CPU runs in float32, on rounded operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node, map_arg
from torch.utils.flop_counter import FlopCounterMode

from ampcompile.config import Options
from ampcompile.dtypes import LOW, short_name
from ampcompile.torch_private import processor, pytree
from ampcompile.torch_private.dispatcher import OpOverload
from ampcompile.torch_private.tracing import product_hint

from .op_traits import writes

LINEAR = torch.ops.aten.linear.default
SMALL, A_NUMBER = 1 << 19, 8
"""Products and convolutions of up to `SMALL` multiplications run in float32 on every CPU; each number that is widened
or rounded counts as `A_NUMBER`. On CPUs with units for bfloat16 oneDNN takes 16 us to start a product, 50 for a
convolution, 125 for its backward; torch's kernels for float32 take 1 to 5."""
DENSE = 24
"""Multiplications for each number read or written. From so many on, arithmetic takes longer than memory; with fewer, as
with few rows, 16 bits are faster because they are half the bytes, though their units aren't faster."""
STARTS = 3 << 19
"""Multiplications that such units do in the 19 us by which oneDNN starts a product later than MKL one in float32."""


def is_emulated(device_type: str, dtype: torch.dtype) -> bool:
    """True if a device has no units for a 16-bit type."""
    return device_type == "cpu" and dtype in LOW and not processor.multiplies(dtype)


def advice_without_units(dtype: torch.dtype) -> str:
    """Return a line about a CPU without units for a 16-bit type, and what to do."""
    return (
        f'this CPU has no units for {short_name(dtype)} and is often faster in float32: leave out backend="amp" for '
        "that, or compare both by `python -m ampcompile bench`"
    )


def is_small(multiplications: int | torch.SymInt, numbers: int | torch.SymInt) -> bool:
    """True if a CPU's product is small enough to run in float32; `numbers`: elements of its operands and result."""
    work = product_hint(multiplications + A_NUMBER * numbers)
    return work is not None and work <= SMALL


def is_dense(multiplications: int | torch.SymInt, numbers: int | torch.SymInt) -> bool:
    """True if a product's start and arithmetic decide its time; `numbers`: elements of its operands and result."""
    work, moved = product_hint(multiplications), product_hint(numbers)
    return work is not None and moved is not None and STARTS + work >= DENSE * moved


def runs_in_float32(dtype: torch.dtype, multiplications: int, numbers: int) -> bool:
    """True if this CPU runs a product of a dtype in float32, by default options."""
    if dtype not in LOW or not processor.multiplies(dtype) or is_small(multiplications, numbers):
        return True
    return is_dense(multiplications, numbers) and not processor.multiplies_faster(dtype)


@dataclass(frozen=True)
class WideProducts:
    """The products of 16-bit operands that run in float32 on the CPU (`Options.products`)."""

    all: frozenset[torch.dtype] = frozenset()  # the types whose products all do: the CPU emulates them
    dense: frozenset[torch.dtype] = frozenset()  # whose dense products do: units for them are no faster than float32's
    small: bool = False  # True: small products of any type do

    @classmethod
    def on_this_cpu(cls, options: Options) -> WideProducts:
        """The products that `options.products` asks for or, if it is "auto", that the CPU decides on."""
        if options.products == "torch" or options.lower == "eager":
            return cls()
        if options.products == "float32":
            return cls(all=frozenset(LOW))
        return cls(
            frozenset(dtype for dtype in LOW if not processor.multiplies(dtype)),
            frozenset(dtype for dtype in LOW if not processor.multiplies_faster(dtype)),
            options.lower == "inductor",  # which fuses the widening
        )

    def __bool__(self) -> bool:
        return bool(self.all or self.dense or self.small)

    def __str__(self) -> str:
        names = (",".join(sorted(map(str, dtypes))) for dtypes in (self.all, self.dense))
        return " ".join([*names, str(self.small)])


NO_PRODUCTS = WideProducts()


def is_dense_product(node: Node) -> bool:
    """True for a node whose op is, or is made of, dense products, by the fakes of its operands and result."""
    has_fakes = all("val" in value.meta for value in (node, *node.all_input_nodes))
    if not isinstance(node.target, OpOverload) or writes(node.target) or not has_fakes:
        return False
    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    result = node.meta["val"]
    numbers = numbers_of((args, kwargs, result))
    if node.target is LINEAR and len(args) > 1:  # most graphs have many, and running one takes a millisecond
        return is_dense(result.numel() * args[1].shape[-1], numbers)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        node.target(*args, **kwargs)
    flops = product_hint(counter.get_total_flops()) or 0
    return flops > 0 and is_dense(flops // 2, numbers)


def numbers_of(values: Any) -> int | torch.SymInt:
    """The elements of all tensors among nested values."""
    return sum(value.numel() for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor))


def operands(arguments: dict[str, Any]) -> tuple[Any, Any]:
    """The rows and the matrix of a linear product, by the names in its schema."""
    if "weight" in arguments:
        return arguments["input"], arguments["weight"]
    if "mat1" in arguments:
        return arguments["mat1"], arguments["mat2"]
    return arguments["self"], arguments.get("mat2", arguments.get("other"))


def bias_of(arguments: dict[str, Any]) -> Any:
    """The operand that is added to a linear product; None: nothing."""
    return arguments.get("bias") if "weight" in arguments else arguments.get("self") if "mat1" in arguments else None


def result_width(arguments: dict[str, Any]) -> Any:
    """The features of the result."""
    return arguments["weight"].shape[0] if "weight" in arguments else operands(arguments)[1].shape[1]
