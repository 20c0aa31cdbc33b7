"""Return low-precision results of the outermost compiled call in float32 if no autocast is open around it.

The caller can then pass them to anything: a loss, an eager layer, NumPy. Inside the call, in code between graph breaks
and in compiled callables that it calls, results keep eager autocast's dtypes.
"""

import copy
from collections import OrderedDict
from collections.abc import Mapping, Set
from dataclasses import is_dataclass
from operator import is_not
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ampcompile.errors import warn_user
from ampcompile.torch_private import pytree
from ampcompile.torch_private.memory import memory_of, owns_memory

from .call_state import current_call

BECAUSE = "leaves the compiled call in float32: no autocast is open around it"
_HOLD_NOTHING = frozenset({type(None), int, float, bool, str, torch.Size, torch.dtype, torch.device})
_warned: WeakSet[type] = WeakSet()


class Widening:
    """Makes what a call returned leave it with its tensors of dtype `low` in float32, those in containers too.

    Tuples, lists, dicts and their subclasses, dataclasses, and classes that pytree knows are copied where a tensor in
    them changes. A tensor or container that occurs twice still does. These stay as they are: arguments, parameters,
    buffers, what shares their memory, and all results if a module and its arguments have floating numbers of dtype
    `low` alone. `module`: of which a method was called, if any; `first`: its first parameter.
    """

    def __init__(
        self, low: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module | None, first: Any
    ) -> None:
        self.low, self.args, self.kwargs, self.module, self.first = low, args, kwargs, module, first
        # Tensors and containers by id, and what leaves instead of each.
        self.made: dict[int, Any] = {id(value): value for value in (*args, *kwargs.values())}
        self.tensors: list[Tensor] | None = None
        self.all_was_low: bool | None = None

    def of(self, value: Any) -> Any:
        """Return what leaves instead of a value."""
        is_tensor = isinstance(value, Tensor)
        if value.dtype is not self.low if is_tensor else type(value) in _HOLD_NOTHING:
            return value
        if (key := id(value)) not in self.made:
            self.made[key] = value  # for a container that holds itself
            self.made[key] = self._widen(value) if is_tensor else self._rebuild(value, type(value))
        return self.made[key]

    def _widen(self, tensor: Tensor) -> Tensor:
        if _is_of_parameter(tensor):
            return tensor
        if self.all_was_low is None:
            self.all_was_low = self._finds_low_alone()
        if self.all_was_low or (not owns_memory(tensor) and self._shares_memory(tensor)):
            return tensor
        cast = current_call.cast or Tensor.float
        if not tensor.requires_grad or torch.is_grad_enabled():
            return cast(tensor)
        with torch.enable_grad():  # a region with gradients inside a call without computed it
            return cast(tensor)

    def _finds_low_alone(self) -> bool:
        if self.module is None:  # a function may read weights that nobody knows
            return False
        if self._is_other(self.first) or any(map(self._is_other, self.args)):
            return False  # as in nearly all calls, without a look at all parameters
        floating = [tensor for tensor in self._of_caller() if tensor.is_floating_point()]
        return bool(floating) and not any(map(self._is_other, floating))

    def _is_other(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype is not self.low and value.is_floating_point()

    def _shares_memory(self, tensor: Tensor) -> bool:
        memory = memory_of(tensor)
        return memory is not None and any(memory_of(each) == memory for each in self._of_caller())

    def _of_caller(self) -> list[Tensor]:
        """The parameters and buffers of the module, and the tensors among the arguments."""
        if self.tensors is None:
            own = (*self.module.parameters(), *self.module.buffers()) if self.module is not None else ()
            arguments = pytree.arg_tree_leaves(*self.args, **self.kwargs)
            self.tensors = [*own, *(value for value in arguments if isinstance(value, Tensor))]
        return self.tensors

    def _rebuild(self, container: Any, kind: type) -> Any:
        if kind is tuple or kind is list:
            new = [self.of(part) for part in container]
            return kind(new) if any(map(is_not, new, container)) else container
        if kind is dict:
            changed = self._changed(container)
            return container | changed if changed else container
        try:
            if issubclass(kind, dict) or is_dataclass(kind):
                return self._rebuild_fields(container, kind)
            if (opened := pytree.open_container(container)) is not None:
                parts, rebuild = opened
                new = [self.of(part) for part in parts]
                return rebuild(new) if any(map(is_not, new, parts)) else container
            if isinstance(container, Mapping | Set):
                values = container.values() if isinstance(container, Mapping) else container
                if any(isinstance(value, Tensor) and value.dtype is self.low for value in values):
                    _warn(kind, "its class isn't registered in torch.utils._pytree")
        except Exception as error:  # a class of the user's may raise any error
            _warn(kind, f"{type(error).__name__}: {error}")
        return container

    def _rebuild_fields(self, container: Any, kind: Any) -> Any:
        """Copy a dict of a class of its own, or a dataclass, or both, if one of its items or fields changes."""
        items = self._changed(container) if issubclass(kind, dict) else {}
        names = kind.__dataclass_fields__ if is_dataclass(kind) else ()
        fields = self._changed({name: getattr(container, name) for name in names if hasattr(container, name)})
        if not items and not fields:
            return container
        if items and names:  # a ModelOutput of transformers, of which `copy.copy` takes 19 us
            copied: Any = kind.__new__(kind)
            (OrderedDict if issubclass(kind, OrderedDict) else dict).update(copied, container)
            vars(copied).update(vars(container))
        elif (copied := copy.copy(container)) is container:
            raise TypeError("copy.copy returns the object itself")
        for key, value in items.items():
            dict.__setitem__(copied, key, value)
        for name, value in fields.items():
            object.__setattr__(copied, name, value)
        return copied

    def _changed(self, parts: Mapping[Any, Any]) -> dict[Any, Any]:
        return {name: new for name, part in parts.items() if (new := self.of(part)) is not part}


def _is_of_parameter(tensor: Tensor) -> bool:
    whole = tensor if tensor._base is None else tensor._base
    return whole.is_leaf and whole.requires_grad


def _warn(kind: type, why: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        warn_user(
            f"found a {kind.__qualname__} among the results of a compiled call, expected a container that can be "
            f"copied ({why}). It leaves as it is, with its 16-bit tensors: return another container, or convert them "
            "yourself."
        )
