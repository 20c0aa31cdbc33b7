"""Widen results of a call that no graph has widened: also those in containers, and those that share memory.

They come from before the last graph break, from eager code, or from memory that the call keeps elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import is_dataclass
from operator import is_not
from sys import getrefcount
from typing import Any
from weakref import WeakSet

import torch

from ampcompile.errors import AmpWarning
from ampcompile.torch_private.frame_returns import memory_of
from ampcompile.torch_private.storages import is_sole_holder, owns_memory

from .call_state import current_call
from .containers import parts_of, with_parts
from .shared_memory import cast_together
from .unmatched import outside

HOLD_NO_TENSORS = frozenset({torch.Tensor, type(None), int, float, bool, str})
"""Types that can't hold tensors to widen."""
_BUILT_IN = frozenset({tuple, list, dict})
(_ONE_HOLDER,) = map(getrefcount, {0: object()}.values())  # `getrefcount` of an object that one container holds
_warned: WeakSet[type] = WeakSet()  # classes of containers that were left as they are


class Widening:
    """Widens a call's result: its tensors of one dtype become float32, also inside containers.

    `of_user()`: the tensors that existed before the call. Tensors that share their memory stay as they are, and so do
    containers in which nothing changes. Results that share memory still do afterwards.
    """

    def __init__(self, dtype: torch.dtype, of_user: Callable[[], Iterable[Any]]) -> None:
        self.dtype, self.of_user = dtype, of_user
        self.watched = current_call.cast
        # All by id: containers, parts that others hold too, parts of containers, tensors to widen, replacements.
        self.containers: dict[int, Any] = {}
        self.held: set[int] = set()
        self.parts: dict[int, dict[Any, Any]] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.made: dict[int, Any] = {}

    def of(self, result: list[Any]) -> Any:
        """Widen the only item of a list. A variable for the item would add a reference to it."""
        self._find(result, 0)
        if self.tensors:
            self._widen()
        return self._rebuild(result[0])

    def _find(self, parts: Collection[Any], others: int) -> None:
        """Widen tensors that only this container holds, and collect other tensors and containers.

        `others`: references to each part besides the container's own.
        """
        expected = _ONE_HOLDER + others
        for part, count in zip(parts, list(map(getrefcount, parts)), strict=True):
            key = id(part)
            if isinstance(part, torch.Tensor):
                if part.dtype is not self.dtype:
                    continue
                plain = not part.requires_grad or (not part.is_leaf and torch.is_grad_enabled())
                if count == expected and plain and self.watched is None and is_sole_holder(part):
                    self.made[key] = part.float()
                    continue
                self.tensors[key] = part
            elif type(part) in HOLD_NO_TENSORS or key in self.containers:
                continue
            else:
                self.containers[key] = part
                self._open(part)
            if count != expected:
                self.held.add(key)

    def _open(self, container: Any) -> None:
        kind = type(container)
        if kind in _BUILT_IN:
            self._find(container.values() if kind is dict else container, 0)
            return
        try:
            parts = self.parts[id(container)] = parts_of(container)
        except Exception as error:  # a class of the user's may raise any error
            _warn(container, error)
            return
        # One reference from `parts`. A ModelOutput holds each part as an item and as an attribute.
        self._find(parts.values(), 2 if isinstance(container, dict) and is_dataclass(kind) else 1)

    def _widen(self) -> None:
        """Widen the collected tensors, which others may hold or share memory with."""
        user_memory: set[int] | None = None
        sharing = dict[int, list[torch.Tensor]]()
        for tensor in self.tensors.values():
            sharing.setdefault(_memory(tensor), []).append(tensor)
        for memory, tensors in sharing.items():
            if len(tensors) > 1 or id(tensors[0]) in self.held or not owns_memory(tensors[0]):
                if user_memory is None:
                    user_memory = {_memory(value) for value in self.of_user() if isinstance(value, torch.Tensor)}
                if memory in user_memory:
                    continue
            if computed := [tensor for tensor in tensors if not _is_of_parameter(tensor)]:
                # A region with gradients inside a call without may have computed the tensor.
                with torch.set_grad_enabled(torch.is_grad_enabled() or any(t.requires_grad for t in computed)):
                    self.made |= zip(map(id, computed), (self.watched or cast_together)(computed), strict=True)

    def _rebuild(self, value: Any) -> Any:
        key = id(value)
        if key in self.made or key not in self.containers:
            return self.made.get(key, value)
        self.made[key] = value  # for containers that contain themselves
        parts = self.parts.get(key)
        old = list(parts.values() if parts is not None else value.values() if type(value) is dict else value)
        new = list(map(self._rebuild, old))
        if not any(map(is_not, new, old)):
            return value
        if parts is None:
            self.made[key] = type(value)(zip(value, new, strict=True) if type(value) is dict else new)
        else:
            changed = {name: part for name, part in zip(parts, new, strict=True) if part is not parts[name]}
            try:
                self.made[key] = with_parts(value, parts, changed, key not in self.held)
            except Exception as error:
                _warn(value, error)
        return self.made[key]


def _memory(tensor: torch.Tensor) -> Any:
    """A key that is equal for tensors that share memory; a key of its own for a tensor without memory."""
    return memory_of(tensor) or -id(tensor)


def _is_of_parameter(tensor: torch.Tensor) -> bool:
    whole = tensor if tensor._base is None else tensor._base
    return whole.is_leaf and whole.requires_grad


def _warn(value: Any, error: Exception) -> None:
    if (kind := type(value)) not in _warned:
        _warned.add(kind)
        warnings.warn(
            f"found a {kind.__qualname__} among the results of a compiled call, expected a container that can be "
            f"copied ({type(error).__name__}: {error}). It leaves as it is, with its 16-bit tensors: return another "
            "container, or convert them yourself.",
            AmpWarning,
            stacklevel=outside(),
        )
