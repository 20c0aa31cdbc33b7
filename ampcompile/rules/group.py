"""The type of one entry of the op tables: ops, the rule for their operands, devices, and the reason."""

from dataclasses import dataclass
from typing import Literal

Category = Literal[
    "lower_precision_fp",  # floating operands are cast to the low type
    "fp32",  # floating operands are cast to float32
    "fp32_set_opt_dtype",  # nothing is cast; the argument `dtype` is float32 unless the user gave one
    "fp32_append_dtype",  # nothing is cast; the overload that takes a dtype is called, with float32
    "promote",  # floating operands are cast to the widest among them
    "follow_destination",  # floating operands are cast to the dtype of the first, which is written in place
    "fp32_inside",  # floating operands are cast to float32, floating results to the low type
    "fp32_round_trip",  # floating operands are cast to float32, floating results back to the first one's dtype
    "as_arrives",  # nothing is cast
    "banned",  # raises, as in eager autocast
]
Version = tuple[int, int]
GPU_LIKE = ("cuda", "xpu", "mtia", "maia")
ACCELERATORS = (*GPU_LIKE, "mps")
EVERY_DEVICE = ("cpu", *ACCELERATORS)


@dataclass(frozen=True)
class Group:
    """Ops (`name` or `name.overload`, blank-separated, aten's unless prefixed) in one category for one reason."""

    category: Category
    devices: tuple[str, ...]
    because: str
    ops: str
    since: Version | None = None
    """First supported torch release whose autocast has them."""
    before: Version | None = None
    """First supported torch release whose autocast lacks them again."""
    follows: tuple[tuple[str, str], ...] = ()
    keeps: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    redispatch: str = ""

    def names(self) -> list[str]:
        """The ops' full names, as `aten::linear`."""
        return [op if "::" in op else f"aten::{op}" for op in self.ops.split()]
