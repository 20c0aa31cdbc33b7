"""Read the parts of containers that a call returns, and rebuild containers with some parts replaced."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any

_SETS = (set, frozenset)
_SEQUENCES = (tuple, list, deque, *_SETS)


def parts_of(value: Any) -> dict[Any, Any]:
    """The parts of a tuple, list, deque, set, mapping or dataclass, by index, key or field; {} for other objects."""
    if isinstance(value, _SEQUENCES):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value.items())
    if is_dataclass(type(value)):
        return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    return {}


def with_parts(value: Any, parts: Mapping[Any, Any], changed: Mapping[Any, Any], in_place: bool) -> Any:
    """The container with the `changed` parts replaced: a copy, or itself if it may be changed `in_place`.

    Raises TypeError if copies of its class don't have items of their own, and whatever the methods of its class raise.
    """
    wanted = {**parts, **changed}
    if isinstance(value, tuple):
        result = _tuple_like(value, wanted.values())
    elif isinstance(value, _SETS):
        result = type(value)(wanted.values())
    elif isinstance(value, MappingProxyType):
        result = MappingProxyType(wanted)
    else:
        mapping = isinstance(value, Mapping)
        owns = isinstance(value, dict) or not mapping  # other mappings may keep items in an object that copies share
        result = value if in_place and owns else copy.copy(value)
        if (result is value and not in_place) or not (owns or hasattr(type(value), "__copy__")):
            raise TypeError("copy.copy gives none with items of its own")
        for key, part in changed.items():
            if mapping or isinstance(value, _SEQUENCES):
                result[key] = part
            else:
                object.__setattr__(result, key, part)
        if result is value:
            return value
    if type(result) is not type(value) or {*map(id, parts_of(result).values())} != {*map(id, wanted.values())}:
        raise TypeError("a copy of it holds something else")
    return result


def _tuple_like(value: Any, items: Collection[Any]) -> Any:
    """A tuple of the same class, without calling its constructor, which may take other arguments than items."""
    if hasattr(type(value), "n_sequence_fields"):  # a struct sequence of C, such as torch.return_types.max
        return type(value)(items)
    result = tuple.__new__(type(value), items)
    if hasattr(value, "__dict__"):
        vars(result).update(vars(value))
    return result
