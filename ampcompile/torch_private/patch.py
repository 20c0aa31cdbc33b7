"""A patch of torch, and a group of patches."""

from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any

_resolve = cache(resolve_name)


@dataclass(frozen=True)
class Patch:
    """One attribute or object of torch that is changed, by its full name."""

    what: str
    why: str

    @property
    def owner(self) -> Any:
        """The module, class or object that holds it. Raises AttributeError or ImportError where there is none."""
        return _resolve(self.what.rpartition(".")[0])

    @property
    def name(self) -> str:
        """The attribute's name."""
        return self.what.rpartition(".")[2]

    @property
    def place(self) -> str:
        """The names of owner and attribute, such as `Tensor.data`."""
        return ".".join(self.what.split(".")[-2:])


@dataclass(frozen=True, eq=False)
class Group:
    """Patches that come and go together."""

    name: str
    when: str
    undone: str
    patches: tuple[Patch, ...]
