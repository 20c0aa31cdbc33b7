"""Check that a graph gives the same numbers when it runs again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ampcompile.passes.analysis.op_traits import STATISTICS, STATISTICS_UNREAD_IF, has
from ampcompile.passes.analysis.schema import arguments_by_name, arguments_of, name_of, written_arguments
from ampcompile.torch_private.types import OpOverload


def only_updates_statistics(value: Node) -> bool:
    """True if a written input is only a statistic or counter: no result depends on its old value."""
    return all(_updates_statistics(user, value) or _updates_itself(user, value) for user in value.users)


def _updates_statistics(user: Node, value: Node) -> bool:
    if not has(user.target, STATISTICS_UNREAD_IF.keys()):
        return False
    arguments = arguments_by_name(user.target, user.args, user.kwargs)
    names = {name for name, argument in arguments.items() if argument is value}
    return bool(arguments[STATISTICS_UNREAD_IF[name_of(user.target)]]) and names <= STATISTICS


def _updates_itself(user: Node, value: Node) -> bool:
    if not isinstance(user.target, OpOverload) or user.users:
        return False
    first = arguments_of(user.target)[0].name
    return first in written_arguments(user.target) and user.args[0] is value and user.all_input_nodes == [value]


class RandomNumbersDrawn(Exception):
    """Random numbers were drawn."""


@contextlib.contextmanager
def forbid_random_numbers(values: Sequence[Any]) -> Iterator[None]:
    """Raise RandomNumbersDrawn at the end if any were drawn on a tensor's device, with the generators restored."""
    devices = {value.device for value in values if isinstance(value, Tensor)} | {torch.device("cpu")}
    modules = [(d, torch.get_device_module(d)) for d in devices if d.type != "cpu"]
    before: list[tuple[Any, Tensor, tuple[Any, ...]]] = [(torch, torch.get_rng_state(), ())]
    before += [(module, module.get_rng_state(device), (device,)) for device, module in modules]
    yield
    drawn = [not torch.equal(state, module.get_rng_state(*where)) for module, state, where in before]
    if any(drawn):
        for module, state, where in before:
            module.set_rng_state(state, *where)
        raise RandomNumbersDrawn
