"""Return low-precision results of the outermost compiled call in float32 if no autocast is open around it.

The caller can then pass them to anything: a loss, an eager layer, NumPy. Inside the call, in code between graph breaks
and in compiled callables that it calls, results keep eager autocast's dtypes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from operator import is_not
from sys import getrefcount
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ampcompile.errors import warn_user
from ampcompile.torch_private.storages import memory_of, own_memory_together, owns_memory

from . import current_call
from .containers import BUILTIN, HOLD_NOTHING, NEAREST, held_by, is_container, open_container, walk
from .module_names import used_by

BECAUSE = "leaves the compiled call in float32: no autocast is open around it"
_warned: WeakSet[type] = WeakSet()


@dataclass
class Habits:
    """What earlier calls of a callable tell of its next one. `notes`: note before it what its arguments hold.

    `moves`: a call has moved what it returns into its arguments, or out of them. To see that, the first notes, too.
    """

    notes: bool = True
    moves: bool = False


class Widening:
    """Makes what a call returned leave it with its tensors of dtype `low` in float32, those in containers too.

    Containers in which a tensor changes are copied. A tensor or container that occurs twice still does. These stay as
    they are: what came in with the arguments, at any depth; parameters and buffers; what shares their memory; and all
    results if a module and its arguments have floating numbers of dtype `low` alone. `fn`: what was called; `module`:
    the module that `fn` is or is a method of, if any; `first`: the module's first parameter.

    What only the result holds was computed, so most calls open no argument. Others search their arguments afterwards.
    What the call itself has moved into them then looks as if it had come in, unless `note_arguments` was called before:
    so it is for a callable with that habit, and before a graph is compiled, whose first run may show the habit.
    """

    def __init__(
        self,
        low: torch.dtype,
        arguments: tuple[Any, ...],
        fn: Any,
        module: nn.Module | None,
        first: Tensor | None,
        habits: Habits,
    ) -> None:
        self.low, self.arguments, self.fn, self.module, self.first = low, arguments, fn, module, first
        self.habits = habits
        # What came in, as far as it is known, by id; `all_given`: if that is all.
        self.given, self.all_given = {id(argument): argument for argument in arguments}, False
        # By the id of each container, and of each tensor that may change, how many holders of it are known.
        self.holders: dict[int, int] = {}
        self.found: list[Tensor] = []
        self.shared: list[Any] = []  # containers that others hold too: they may have come in
        # By the ids of containers and tensors: the object, which keeps its id, and what is known of it.
        self.opened: dict[int, tuple[Any, Sequence[Any], Callable[[list[Any]], Any]]] = {}
        self.replacements: dict[int, tuple[Any, Any]] = {}
        self.tensors: list[Tensor] | None = None
        if habits.notes:
            self.note_arguments()

    def note_arguments(self) -> None:
        """Note what the arguments hold, before the call changes that."""
        if not self.all_given:
            self.given, self.all_given = held_by(self.arguments), True

    def widen(self, results: list[Any]) -> Any:
        """Return what leaves instead of the one value in a list, to which the caller keeps no other reference."""
        self._find(results, 1)
        if self.all_given:
            self._learn()
        if not (self.found or self.shared) or self._is_all_low():
            return results[0]
        held = self._cast_unheld()
        if held or self.shared:
            self._cast_computed(held)
        return self._remake(results)[0] if self.replacements else results[0]

    def _find(self, values: Sequence[Any], known: int) -> None:
        """Find the tensors in some values that may change; `known`: how many references to each value are known."""
        low, holders, given = self.low, self.holders, self.given
        others: list[Any] = []
        for value in values:
            if value.dtype is low if (tensor := isinstance(value, Tensor)) else type(value) not in HOLD_NOTHING:
                key = id(value)
                if key not in holders and key not in given:
                    (self.found if tensor else others).append(value)
                holders[key] = holders.get(key, 0) + known
        if others:
            value = None  # else the loop's variable counts as a holder
            self._open(others)

    def _open(self, values: list[Any]) -> None:
        """Find the tensors that may change in what some values hold."""
        for value, count in zip(values, _count_references(values), strict=True):
            shared = count > self.holders[id(value)] + _REFERENCES
            if shared and not self.all_given and _may_hold_tensors(value):
                self.shared.append(value)
                continue
            try:
                opened = open_container(value)
            except Exception as error:  # a class of the user's may raise any error
                _warn(type(value), f"{type(error).__name__}: {error}")
                continue
            if opened is not None:
                parts, remake, known = opened
                self.opened[id(value)] = value, parts, remake
                self._find(parts, known)

    def _cast_unheld(self) -> list[Tensor]:
        """Cast the tensors found that nobody else holds, and return the others."""
        unheld: list[Tensor] = []
        views: list[Tensor] = []
        held: list[Tensor] = []
        holders = self.holders
        for tensor, count in zip(self.found, _count_references(self.found), strict=True):
            if count > holders[id(tensor)] + _REFERENCES or type(tensor) is not Tensor:
                held.append(tensor)
            else:
                (unheld if owns_memory(tensor) else views).append(tensor)
        if views:
            own = own_memory_together([*unheld, *views])
            for view in views:
                (unheld if id(view) in own else held).append(view)
        self._cast(unheld)
        return held

    def _cast_computed(self, held: list[Tensor]) -> None:
        """Cast what was computed of the tensors that others hold, and in containers that others hold."""
        if not self.all_given:
            self._search([*held, *self.shared])
            self.found = []
            self._open([value for value in self.shared if id(value) not in self.given])
            held += self._cast_unheld()
        self._cast([tensor for tensor in held if id(tensor) not in self.given and self._is_computed(tensor)])

    def _cast(self, tensors: list[Tensor]) -> None:
        cast, gradients = current_call.cast or _float, torch.is_grad_enabled()
        for tensor in tensors:
            if gradients or not tensor.requires_grad:
                self.replacements[id(tensor)] = tensor, cast(tensor)
            else:
                with torch.enable_grad():  # it was computed in a region with gradients, inside a call without
                    self.replacements[id(tensor)] = tensor, cast(tensor)

    def _search(self, values: list[Any]) -> None:
        """Add to what is known to have come in, until all of some values are, or all that the arguments hold."""
        missing = {id(value): value for value in values}
        views = {id(v): memory_of(v) for v in values if isinstance(v, Tensor) and not owns_memory(v)}
        given: dict[int, Any] = {}
        for value in walk(self.arguments, given):
            came_in = {id(value)}
            if views and isinstance(value, Tensor) and (memory := memory_of(value)) is not None:
                came_in |= {key for key, of_view in views.items() if of_view == memory}
            for key in came_in & missing.keys():
                self.given[key] = missing.pop(key)
                if not missing:
                    return
        self.given, self.all_given = self.given | given, True

    def _learn(self) -> None:
        """Learn from a call before which all was noted."""
        if not self.habits.moves:
            after = held_by(self.arguments)
            self.habits.moves = any((key in after) is not (key in self.given) for key in self.holders)
        self.habits.notes = self.habits.moves

    def _is_all_low(self) -> bool:
        if self.module is None:  # a function may read weights that nobody knows
            return False
        if self.first is not None and self.first.dtype is not self.low and self.first.is_floating_point():
            return False  # as in nearly all calls, without a look at anything else
        near = islice(walk(self.arguments, {}), NEAREST)
        floating = (tensor.dtype for tensor in _tensors_of((*near, self.module)) if tensor.is_floating_point())
        return next(floating, None) is self.low and all(dtype is self.low for dtype in floating)

    def _is_computed(self, tensor: Tensor) -> bool:
        """True if a tensor that may be held elsewhere, or share memory, isn't the caller's."""
        whole = tensor if tensor._base is None else tensor._base
        if isinstance(whole, nn.Parameter | nn.Buffer):
            return False
        if any(value is whole for value in self._of_caller()):
            return False
        memory = None if owns_memory(tensor) else memory_of(tensor)
        return memory is None or all(memory_of(tensor) != memory for tensor in self._of_caller())

    def _of_caller(self) -> list[Tensor]:
        """The tensors that the arguments hold, and the parameters and buffers of modules that the call visibly uses.

        A leaf that requires gradients, which a function has in its closure or in a global variable, is its parameter.
        """
        if self.tensors is None:
            used: list[Any] = [self.module]
            if self.module is None:
                with suppress(ValueError):  # a variable of its closure has no value
                    used = used_by(self.fn)
            used = [v for v in used if not isinstance(v, Tensor) or (v.is_leaf and v.requires_grad)]
            self.tensors = [*_tensors_of((*self.given.values(), *used))]
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


def _may_hold_tensors(value: Any) -> bool:
    near = [*islice(walk((value,), {}, room=0), NEAREST)]
    unknown = [value for value in near if type(value) not in BUILTIN and type(value) not in HOLD_NOTHING]
    return len(near) == NEAREST or any(isinstance(value, Tensor) or is_container(value) for value in unknown)


def _tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among some values, and the parameters and buffers of the modules."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, nn.Module):
            yield from value.parameters()
            yield from value.buffers()


def _warn(kind: type, why: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        warn_user(
            f"found a {kind.__qualname__} among the results of a compiled call, expected a container that can be "
            f"copied ({why}). It leaves as it is, with its 16-bit tensors: return another container, or convert them "
            "yourself."
        )
