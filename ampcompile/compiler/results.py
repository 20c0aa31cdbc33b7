"""Return low-precision results of the outermost compiled call in float32 if no autocast is open around it.

The caller can then pass them to anything: a loss, an eager layer, NumPy. Inside the call, in code between graph breaks
and in compiled callables that it calls, results keep eager autocast's dtypes.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import is_not
from sys import getrefcount
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ampcompile.errors import warn_user
from ampcompile.torch_private.storages import memory_of, owns_memory

from .call_state import current_call
from .containers import HOLD_NOTHING, open_container
from .module_names import used_by

BECAUSE = "leaves the compiled call in float32: no autocast is open around it"
_warned: WeakSet[type] = WeakSet()


class Widening:
    """Makes what a call returned leave it with its tensors of dtype `low` in float32, those in containers too.

    Containers in which a tensor changes are copied. A tensor or container that occurs twice still does. These stay as
    they are: what came in with the arguments, at any depth; parameters and buffers; what shares their memory; and all
    results if a module and its arguments have floating numbers of dtype `low` alone. `given`: what `held_by` found
    before the call; `fn`: what was called, `module`: of which it is a method, if any; `first`: its first parameter.
    """

    def __init__(
        self, low: torch.dtype, given: dict[int, Any], fn: Any, module: nn.Module | None, first: Tensor | None
    ) -> None:
        self.low, self.given, self.fn, self.module, self.first = low, given, fn, module, first
        # By the id of each tensor that may change, how many holders of it are known.
        self.holders: dict[int, int] = {}
        self.found: list[Tensor] = []
        # By the ids of containers and tensors: the object, which keeps its id, and what is known of it.
        self.opened: dict[int, tuple[Any, Sequence[Any], Callable[[list[Any]], Any]]] = {}
        self.replacements: dict[int, tuple[Any, Any]] = {}
        self.tensors: list[Tensor] | None = None

    def widen(self, value: Any) -> Any:
        """Return what leaves instead of a value, of which the caller keeps no reference."""
        self._find((value,), 1)
        if not self.found:
            return value
        references = _count_references(self.found)
        if self._is_all_low():
            return value
        cast, gradients = current_call.cast or _float, torch.is_grad_enabled()
        for tensor, count in zip(self.found, references, strict=True):
            key, owns = id(tensor), owns_memory(tensor)
            unheld = owns and count <= self.holders[key] + _REFERENCES and type(tensor) is Tensor
            if unheld or self._is_computed(tensor, owns):
                if gradients or not tensor.requires_grad:
                    self.replacements[key] = tensor, cast(tensor)
                else:
                    with torch.enable_grad():  # a region with gradients inside a call without computed it
                        self.replacements[key] = tensor, cast(tensor)
        return self._remake((value,))[0] if self.replacements else value

    def _find(self, values: Sequence[Any], holders: int) -> None:
        """Find the tensors in some values that may change; `holders`: how many references to each value are known."""
        for value in values:
            key = id(value)
            if isinstance(value, Tensor):
                if value.dtype is self.low and key not in self.given:
                    if key not in self.holders:
                        self.found.append(value)
                    self.holders[key] = self.holders.get(key, 0) + holders
            elif type(value) not in HOLD_NOTHING and key not in self.given and key not in self.opened:
                try:
                    opened = open_container(value)
                except Exception as error:  # a class of the user's may raise any error
                    _warn(type(value), f"{type(error).__name__}: {error}")
                    continue
                if opened is not None:
                    parts, remake, known = opened
                    self.opened[key] = value, parts, remake
                    self._find(parts, known)

    def _is_all_low(self) -> bool:
        if self.module is None:  # a function may read weights that nobody knows
            return False
        if self._is_other_float(self.first) or any(map(self._is_other_float, self.given.values())):
            return False  # as in nearly all calls, without a look at all parameters
        floating = [tensor for tensor in self._of_caller() if tensor.is_floating_point()]
        return bool(floating) and not any(map(self._is_other_float, floating))

    def _is_other_float(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype is not self.low and value.is_floating_point()

    def _is_computed(self, tensor: Tensor, owns: bool) -> bool:
        """True if a tensor that may be held elsewhere, or share memory unless it `owns` that, isn't the caller's."""
        whole = tensor if tensor._base is None else tensor._base
        if isinstance(whole, nn.Parameter | nn.Buffer):
            return False
        if any(each is whole for each in self._of_caller()):
            return False
        memory = None if owns else memory_of(tensor)
        return memory is None or all(memory_of(each) != memory for each in self._of_caller())

    def _of_caller(self) -> list[Tensor]:
        """The tensors that the arguments hold, and the parameters and buffers of modules that the call visibly uses.

        A leaf that requires gradients, which a function has in its closure or in a global variable, is its parameter.
        """
        if self.tensors is None:
            used: list[Any] = [self.module]
            if self.module is None:
                with suppress(ValueError):  # a variable of its closure has no value
                    used = used_by(self.fn)
            every = [*self.given.values(), *used]
            modules = [value for value in every if isinstance(value, nn.Module)]
            self.tensors = [value for value in self.given.values() if isinstance(value, Tensor)]
            self.tensors += (tensor for m in modules for tensor in (*m.parameters(), *m.buffers()))
            self.tensors += (t for t in used if isinstance(t, Tensor) and t.is_leaf and t.requires_grad)
        return self.tensors

    def _remake(self, values: Sequence[Any]) -> list[Any]:
        """What leaves instead of each of some values."""
        new = []
        for value in values:
            made = self.replacements.get(key := id(value))
            if made is None and (opened := self.opened.get(key)) is not None:
                _, parts, remake = opened
                made = self.replacements[key] = value, value  # for a container that holds itself
                others = self._remake(parts)
                if any(map(is_not, others, parts)):
                    try:
                        made = self.replacements[key] = value, remake(others)
                    except Exception as error:  # a class of the user's may raise any error
                        _warn(type(value), f"{type(error).__name__}: {error}")
            new.append(value if made is None else made[1])
        return new


_float: Callable[[Tensor], Tensor] = Tensor.float


def _count_references(tensors: list[Any]) -> list[int]:
    return [getrefcount(tensor) for tensor in tensors]


_REFERENCES = _count_references([object()])[0]  # those to a tensor that only the list holds


def _warn(kind: type, why: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        warn_user(
            f"found a {kind.__qualname__} among the results of a compiled call, expected a container that can be "
            f"copied ({why}). It leaves as it is, with its 16-bit tensors: return another container, or convert them "
            "yourself."
        )
