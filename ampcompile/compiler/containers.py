"""What containers hold, at any depth, and copies of them with other parts."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from dataclasses import is_dataclass
from functools import partial
from itertools import islice
from operator import is_
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ampcompile.torch_private import pytree

HOLD_NOTHING = frozenset(
    {type(None), int, float, bool, complex, str, bytes, bytearray, range, torch.Size, torch.dtype, torch.device}
)
NEAREST = 100
"""Where each call asks what is among its arguments, it looks at the first so many values that `walk` yields"""
_ITEMS = (list, tuple, set, frozenset, deque)
BUILTIN = frozenset({dict, *_ITEMS})
_OPAQUE = (nn.Module, type, ModuleType, FunctionType, MethodType)
_BASES: tuple[Any, ...] = (OrderedDict, defaultdict, dict, list, tuple, object)
_PARTS = 1000


def is_container(value: Any) -> bool:
    """Return True if `open_container` opens a value; nothing is opened."""
    kind: Any = type(value)
    if issubclass(kind, _BASES[:-1]) or pytree.is_registered(kind):
        return True
    if is_dataclass(kind):
        return not isinstance(value, nn.Module)
    return isinstance(value, Mapping | Set | Sequence | ValuesView) and not isinstance(value, str | memoryview)


def open_container(value: Any) -> tuple[Sequence[Any], Callable[[list[Any]], Any], int] | None:
    """The parts of a container; a function that makes a copy of it with other parts; and how many references to each
    part the container and this result hold together, at least.

    None for objects that are no containers. Raises whatever a class of the user's does.
    """
    kind: Any = type(value)
    if kind is tuple or kind is list:
        return value, kind, 1
    if kind is dict:
        return list(value.values()), lambda new: dict(zip(value, new, strict=True)), 2
    if not issubclass(kind, dict) and (opened := pytree.open_registered(value)) is not None:
        holds = (
            isinstance(value, deque | list | tuple) and len(value) == len(opened[0]) and all(map(is_, opened[0], value))
        )
        return *opened, 1 + holds
    if isinstance(value, dict | list | tuple) or (is_dataclass(kind) and not isinstance(value, nn.Module)):
        base = next(base for base in _BASES if isinstance(value, base))
        # By the methods of the base: those of its own class may make other objects in every call.
        items = (
            [*base.values(value)] if issubclass(base, dict) else [*base.__iter__(value)] if base is not object else []
        )
        attributes = attributes_of(value)
        return [*items, *attributes.values()], partial(_copy, value, kind, base, attributes), 2
    if isinstance(value, Mapping):
        return [*value.values()], _refuse, 1
    if isinstance(value, Set | Sequence | ValuesView) and not isinstance(value, str | memoryview):
        return [*value], _refuse, 1
    return None


def attributes_of(value: Any) -> dict[str, Any]:
    """An object's attributes, those in slots too; no code of its class runs."""
    state: Any = object.__getstate__(value)
    if isinstance(state, tuple):
        return {**(state[0] or {}), **state[1]}
    return state or {}


def _copy(value: Any, kind: Any, base: Any, attributes: dict[str, Any], new: list[Any]) -> Any:
    """Copy an object of a class of its own, with other items and attributes; no constructor runs."""
    items, others = new[: len(new) - len(attributes)], new[len(new) - len(attributes) :]
    copied: Any
    own: Any = getattr(kind, "__copy__", None)
    if own is not getattr(base, "__copy__", None):
        if (copied := own(value)) is value:
            raise TypeError("its __copy__ returns the object itself")
    else:
        copied = base.__new__(kind, items) if base is tuple else base.__new__(kind)
    if base is list:
        list.__setitem__(copied, slice(None), items)
    elif base is defaultdict:
        copied.default_factory = value.default_factory
    if issubclass(base, dict):
        for key, item in zip(base.keys(value), items, strict=True):
            base.__setitem__(copied, key, item)
    for name, other in zip(attributes, others, strict=True):
        object.__setattr__(copied, name, other)
    return copied


def _refuse(_: Any) -> Any:
    raise TypeError("its class isn't registered in torch.utils._pytree")


def held_by(values: Iterable[Any]) -> dict[int, Any]:
    """Values and what they hold, by id, as `walk` finds it. While the result is there, no other has these ids."""
    held: dict[int, Any] = {}
    deque(walk(values, held), maxlen=0)
    return held


def walk(values: Iterable[Any], held: dict[int, Any], room: int = _PARTS) -> Iterator[Any]:
    """Yield values and what they hold, nearest first: what containers hold, at any depth, then what other objects do.

    All but `HOLD_NOTHING` is noted in `held`, by id, and opened once. Not opened: modules, functions and classes.
    `room`: of what other objects hold, at most so many values are yielded, as an object may hold a whole program.
    """
    near, objects = deque([values]), deque[Any]()
    while near:
        for value in near.popleft():
            yield value
            if (kind := type(value)) in HOLD_NOTHING or (key := id(value)) in held:
                continue
            held[key] = value
            if isinstance(value, Tensor):
                continue
            if isinstance(value, dict):
                near.append(dict.values(value))
            elif isinstance(value, _ITEMS):
                near.append(value)
            elif not is_dataclass(kind):
                objects.append(value)
                continue
            if kind not in BUILTIN:
                near.append(_attributes(value))
        while room > 0 and objects and not near:
            near.append(parts := [*islice(_attributes(objects.popleft()), room)])
            room -= len(parts) or 1


def _attributes(value: Any) -> Collection[Any]:
    if isinstance(value, _OPAQUE):
        return ()
    try:
        return value.values() if isinstance(value, MappingProxyType) else attributes_of(value).values()
    except Exception:  # an attribute of the user's may raise any error
        return ()
