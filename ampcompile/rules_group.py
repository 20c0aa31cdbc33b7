"""The shape of one line of the op tables: some ops, a category, and the reason."""

from dataclasses import dataclass

Version = tuple[int, int]


@dataclass(frozen=True)
class Group:
    """Ops (aten, `name` or `name.overload`, blank-separated) that share a category and a reason on some devices."""

    category: str
    devices: tuple[str, ...]
    because: str
    ops: str
    since: Version | None = None
    """First torch release in which autocast has them."""
    before: Version | None = None
    """First torch release in which autocast lacks them again."""
    follows: tuple[tuple[str, str], ...] = ()
    redispatch: str = ""

    def names(self) -> list[str]:
        """The ops' full names: `aten::linear`."""
        return [f"aten::{op}" for op in self.ops.split()]
