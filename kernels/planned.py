"""Compare an optimizer's tensors with those that a step was planned for, and find its gradients, in a call of C++.

It reads torch's objects by the headers that torch installs, and Python's lists and dicts by their stable functions.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from ampcompile.torch_private import storages

from . import native


def available() -> bool:
    """True if the library can be built here, and read this Python's objects."""
    return native.objects_library("planned") is not None


@functools.cache
def _function(name: str, arguments: int) -> Any:
    function = getattr(native.objects_library("planned"), name)
    function.argtypes, function.restype = [ctypes.c_int64] * arguments, ctypes.c_int64
    return function


_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def _owner(address: int, free: str) -> object:
    """An object of Python's which, as it goes, frees an object of C++ by the function of that name."""
    function = getattr(native.objects_library("planned"), free)
    return _capsule(address, None, ctypes.cast(function, ctypes.c_void_p))


class Change(IntEnum):
    """What changed since an optimizer's tensors were compared last."""

    OTHER = 0  # something else than gradients' addresses
    NONE = 1
    GRADIENTS_MOVED = 2  # their addresses alone


class PlannedTensors:
    """The parameters of an optimizer, plain tensors, their gradients, and its state if that is given.

    Holds none of them. The optimizer is given by its `param_groups` and its `state`. Raises TypeError if they are of
    types that can't be compared.
    """

    def __init__(self, groups: Any, state: Any = None) -> None:
        lists = isinstance(groups, list) and (state is None or isinstance(state, dict))
        self._plan = _function("plan_new", 2)(id(groups), 0 if state is None else id(state)) if lists else 0
        if not self._plan:
            raise TypeError("its parameters and state aren't plain tensors in lists and dicts")
        self._owner = _owner(self._plan, "plan_free")
        self.has_state = state is not None
        self.count = sum(param.grad is not None for group in groups for param in group["params"])
        self.addresses = np.zeros(self.count, dtype=np.int64)
        """Of the gradients, after `compare` has found them moved"""
        self._written = self.addresses.ctypes.data
        self._compare, self._bump_versions = _function("plan_compare", 4), _function("plan_bump_versions", 1)
        self.tensors = self.count, _function("plan_grads", 1)(self._plan)
        """The number of gradients, and where the addresses of their C++ objects stand; right after `compare`"""

    def compare(self, groups: Any, state: Any = None) -> Change:
        """Compare the objects, in their order; their classes, dtypes, devices, layouts and addresses.

        Gradients that share memory count as `OTHER`. `state`: None for parameters and gradients alone.
        """
        if not (isinstance(groups, list) and (state is None or isinstance(state, dict))):
            return Change.OTHER
        return Change(self._compare(self._plan, id(groups), 0 if state is None else id(state), self._written))

    def bump_versions(self) -> None:
        """Raise the versions of all parameters with gradients; right after `compare`."""
        self._bump_versions(self._plan)


class Marks:
    """Identities and versions of gradients, to recognize them later; those without a storage, as sparse ones, aside.

    Holds the records of their memory, so that no other memory has these; without a compiler, the gradients themselves.
    """

    _marks = 0

    def __init__(self, grads: Sequence[Tensor] | PlannedTensors) -> None:
        if available():
            count, place, _ = _places(grads)
            self._marks = _function("marks_new", 2)(count, place)
            self._owner = _owner(self._marks, "marks_free")
        else:
            self._held = {id(grad): (grad, grad._version) for grad in grads}  # type: ignore[union-attr]

    def match(self, grads: Sequence[Tensor] | PlannedTensors) -> bool:
        """Return True if these are among the marked gradients, and none was written or given other memory."""
        if self._marks:
            count, place, _ = _places(grads)
            return bool(_function("marks_match", 3)(self._marks, count, place))
        return all(self._held.get(id(grad), (grad, -1))[1] == grad._version for grad in grads)  # type: ignore[union-attr]

    def renewal(self, grads: Sequence[Tensor]) -> Callable[[], object]:
        """Return a C function that notes the versions of `grads`, of those that were marked, anew when it is called."""
        count, place, self._kept = _places(grads)
        return partial(_function("marks_renew", 3), self._marks, count, place)


def _places(grads: Sequence[Tensor] | PlannedTensors) -> tuple[int, int, object]:
    """How many there are, where the addresses of their C++ objects stand, and who keeps these."""
    if isinstance(grads, PlannedTensors):
        return *grads.tensors, grads
    row = np.array(list(map(storages.tensor_address, grads)), dtype=np.int64)
    return len(row), row.ctypes.data, row


def share_memory(tensors: Sequence[Tensor]) -> bool:
    """Return True if an element of one is an element of another. All are dense."""
    count, place, _row = _places(tensors)
    return not _function("apart", 2)(count, place)
