"""The one form in which optimizers are saved: torch's names and types, and float32 masters. Others are refused."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampcompile.errors import OptimizerError
from ampcompile.torch_private import storages

from .masters import NAMES, masters_of, states_elsewhere
from .plan import NARROW, PLAIN, Group, family_of, parameters
from .states import AMSGRAD, NAMES_OF_CODES, states_of

OWN_SETTINGS: dict[str, Any] = {"masters": None, "states": "float32", "seed": 0}
"""The optimizer's, with their defaults: neither a group nor a file has them"""
NO_SHAPES = ("step", "checksums", "rounding_key")
"""The states that don't have their parameter's shape"""


@dataclass(frozen=True, eq=False)
class Exact:
    """A tensor of a state that is being loaded, which torch would convert to its parameter's type."""

    value: Tensor


def to_file(optimizer: Any, saved: dict[str, Any]) -> None:
    """Give what `state_dict` returns the form of files, one parameter after the other."""
    masters, coder = masters_of(optimizer), states_of(optimizer)
    device = optimizer._ampcompile_step.state_dict_device
    for group in saved["param_groups"]:
        for name in OWN_SETTINGS:
            group.pop(name, None)
    for number, param, _ in _numbered(optimizer, saved):
        if not isinstance(state := saved["state"].get(number), dict):
            continue
        if masters is not None:
            state = masters.with_master(param.detach(), state)
        if coder is not None:
            state = coder.decoded(param.detach(), state)
        if device is not None:
            state = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in state.items()}
        saved["state"][number] = state


def from_file(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """Return what is to be loaded with the state of 16-bit parameters, and what is coded, as torch doesn't convert it.

    Raises OptimizerError, before anything has changed, for a file that the optimizer couldn't go on with.
    """
    states, groups = dict(saved["state"]), [dict(group) for group in saved["param_groups"]]
    for group, own in zip(groups, optimizer.param_groups, strict=False):
        for name in OWN_SETTINGS:
            group.pop(name, None)
            group.update({name: own[name]} if name in own else {})
    coder = states_of(optimizer)
    if coder is not None and any(group.get("amsgrad") for group in groups):
        raise OptimizerError(AMSGRAD.format(coder.how))
    for number, param, settings in _numbered(optimizer, saved):
        if not isinstance(state := states.get(number), dict):
            continue
        if any(state.get(name) == {} for name in NAMES_OF_CODES):  # a flattened file doesn't have them
            if type(param) in PLAIN:
                raise OptimizerError(
                    "found flatten_optimizer_state_dict for coded states of plain tensors, expected shards, in whose "
                    "state torch finds its names: load without that option"
                )
            state = {name: value for name, value in state.items() if name not in NAMES_OF_CODES}
        require_fitting(optimizer, state, number, param, settings)
        has_master = masters_of(optimizer) is not None and param.dtype in NARROW
        if not has_master:
            state = {name: value for name, value in state.items() if name not in NAMES}
        if has_master or (coder is not None and coder.reason_for_float32(param) is None):
            state |= {k: Exact(v) for k, v in state.items() if isinstance(v, Tensor) and k != "step"}
        states[number] = state
    return {**saved, "state": states, "param_groups": groups}


def restore(optimizer: Any) -> None:
    """Load the state of 16-bit parameters with its precision, and code what is coded, one parameter after the other."""
    masters, coder = masters_of(optimizer), states_of(optimizer)
    if masters is None and coder is None:
        return
    others = None if masters is None else states_elsewhere(optimizer, masters.how)
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            for name, exact in state.items():
                if isinstance(exact, Exact):
                    dtype = torch.float32 if exact.value.is_floating_point() else exact.value.dtype
                    state[name] = exact.value.to(param.device, dtype)
            if coder is not None:
                coder.load(param, state, group)
            if masters is not None and others is not None and param.dtype in NARROW:
                masters.load(param, state, others[id(param)])


def drop_own_settings(groups: list[dict[str, Any]], own: Group) -> None:
    """Take the optimizer's settings out of groups; raise if one has others, which nobody would heed.

    torch looks for all that groups have in flattened files.
    """
    for group, name in itertools.product(groups, OWN_SETTINGS):
        if name in group and group[name] != (wanted := own.get(name, OWN_SETTINGS[name])):
            raise OptimizerError(
                f"found {name}={group[name]!r} in a parameter group, expected {wanted!r}, as its optimizer has: give "
                f"it to the optimizer, states by names of parameters too, or make an optimizer of the group"
            )
    for group, name in itertools.product(groups, OWN_SETTINGS):
        group.pop(name, None)


def require_fitting(optimizer: Any, state: dict[str, Any], number: object, param: Tensor, group: Group) -> None:
    """Raise unless a parameter's state in a file is one of torch's or ours, for a parameter of this shape."""
    tensors, coder = family_of(optimizer).tensors, states_of(optimizer)
    row, setting = tensors.OPTIONAL
    known = {*tensors.STATES.values(), "step"}
    wanted = known - {"step"} - (set() if group.get(setting) else {tensors.STATES[row]})
    foreign = [name for name in state if name not in known | NAMES]
    if foreign and not wanted <= state.keys():
        _refuse(f"the states {', '.join(map(repr, foreign))}", f"{', '.join(map(repr, sorted(wanted)))}", number)
    for name in sorted((known | NAMES).difference(NO_SHAPES) & state.keys()):
        if not isinstance(value := state[name], Tensor):
            continue
        if storages.parts_of(part := storages.local_part(value))[0] is not part:
            _refuse(f"{name!r} in a {type(part).__name__}", "a plain tensor of numbers", number)
        if value.shape != param.shape:
            _refuse(f"{name!r} of shape {tuple(value.shape)}", f"{tuple(param.shape)}, as its parameter has", number)
        coded = coder is not None and coder.reason_for_float32(param) is None
        if (coded or name == "master_param") and storages.local_parts([value], [param]) is None:
            _refuse(f"{name!r} of {type(value).__name__}", f"a {type(param).__name__} over the same ranks", number)
        if name != "remainder" and not (value.is_floating_point() or value.is_complex()):
            _refuse(f"{name!r} of {value.dtype}", "numbers of floating point", number)


def _refuse(found: str, expected: str, number: object) -> None:
    raise OptimizerError(
        f"found {found} for parameter {number!r} in the state_dict of an optimizer, expected {expected}: it is of "
        "another optimizer or model, and nothing was loaded. Load it there, or begin without it"
    )


def _numbered(optimizer: Any, saved: dict[str, Any]) -> Iterator[tuple[Any, Tensor, Group]]:
    """The parameters with their numbers, or names, in what `state_dict` returned, and their groups there."""
    numbers = [(number, group) for group in saved["param_groups"] for number in group["params"]]
    for (number, group), param in zip(numbers, parameters(optimizer), strict=False):  # torch raises if there are fewer
        yield number, param, group
