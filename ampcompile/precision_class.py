"""A subclass of a module class with another `forward`, which pickles and may take the class's place."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch


def subclass_with(cls: type, decorator: Callable[[Any], Any], forward: Callable[..., Any]) -> type:
    """A subclass of `cls` under the same name. `decorator(cls)` makes it again, where it is unpickled.

    A class whose methods call `super(Name, self)` and whose name is about to be bound to the result, as by `@`, is
    changed in place: it would find itself as its own parent.
    """
    if _would_find_itself(cls):
        cls.forward = forward  # type: ignore[attr-defined]
        return cls

    def reduce(self: Any, protocol: Any) -> Any:
        if type(self) is made and _named_by(made) is not made:  # the name still means the class that was wrapped
            return _remake, (decorator, cls), self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return super(made, self).__reduce_ex__(protocol)

    members = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    made: Any = type(cls)(cls.__name__, (cls,), members)
    return made


def _remake(decorator: Callable[[Any], Any], cls: type) -> torch.nn.Module:
    made = decorator(cls)
    return made.__new__(made)


def _named_by(cls: type) -> Any:
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return found


def _would_find_itself(cls: type) -> bool:
    for function in filter(inspect.isfunction, vars(cls).values()):
        code = function.__code__
        if "super" in code.co_names and cls.__name__ in code.co_names + code.co_freevars:
            bound = inspect.getclosurevars(function)
            if {**bound.globals, **bound.nonlocals}.get(cls.__name__) is not cls:
                return True
    return False
