"""The shape of one entry of the op tables: some ops, what happens to their operands, on which devices, and why."""

from dataclasses import dataclass

Version = tuple[int, int]
GPU_LIKE = ("cuda", "xpu", "mtia", "maia")
ACCELERATORS = (*GPU_LIKE, "mps")
EVERY_DEVICE = ("cpu", *ACCELERATORS)


@dataclass(frozen=True)
class Group:
    """Ops (`name` or `name.overload`, blank-separated, of aten unless they say so) in one category for one reason."""

    category: str
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
