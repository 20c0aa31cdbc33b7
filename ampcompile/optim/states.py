"""Optimizer states in 16 or 8 bits: which parameters have them, and their form in `optimizer.state` and in files.

`optimizer.state` has codes under names of their own, so that nobody takes them for numbers. Files have torch's names
and types: moments are decoded when they are saved, and coded to nearest when they are loaded, one parameter after the
other. Codes repeat, so a resumed run has the bits of one that wasn't interrupted.
"""

from __future__ import annotations

import fnmatch
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampcompile.errors import OptimizerError, warn_user
from ampcompile.kernels import states as kernel
from ampcompile.kernels.masters import in_memory_order, write_in_memory_order
from ampcompile.kernels.states import Coding, Rounding
from ampcompile.kernels.tables import LONG_MEMORY
from ampcompile.torch_private import optimizers, storages

from .masters import Masters, first_place, make_count, masters_of, numbers_of_a_row, step_on_masters
from .plan import NARROW, PLAIN, SGD, Group, family_of, parameters, require_state

TYPES = {"float32": None, "bfloat16": (torch.bfloat16, torch.bfloat16), "8bit": (torch.int8, torch.uint8)}
"""The types of the first and the second moment, by the value of `states`."""
SCALES = "code_scales"
ALL_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
NAMES_OF_CODES = {SCALES, *(f"{name}_codes" for name in ALL_MOMENTS)}
AMSGRAD = (
    "found amsgrad=True with states={!r}, expected one of both: what a code loses would stay in a largest second "
    'moment. Leave amsgrad out, or take states="float32"'
)
LEAST_ROW = 32
_least_numbers = 4096


@dataclass(eq=False)
class States:
    """The way in which an optimizer keeps its states."""

    how: str | Mapping[str, str]
    seed: int
    masters: Callable[[], Masters | None]
    chosen: dict[int, str]
    """By the parameters' ids, where patterns choose"""

    def of(self, param: Tensor) -> str:
        """Return what was chosen for a parameter."""
        return self.how if isinstance(self.how, str) else self.chosen.get(id(param), "float32")

    def add_group(self, group: Group) -> None:
        """Choose for the parameters of a group that was added, if they have names."""
        if not isinstance(self.how, str):
            for name, param in zip(group.get("param_names", ()), group["params"], strict=False):
                self.chosen[id(param)] = _first_fit(self.how, [optimizers.plain_name(name)])

    def reason_for_float32(self, param: Tensor) -> str | None:
        """Return why a parameter's states are float32; None if they are coded."""
        if (how := self.of(param)) == "float32":
            return "by their names"
        masters, row = self.masters(), numbers_of_a_row(param)
        if param.dtype != torch.float32 and (param.dtype not in NARROW or masters is None):
            return f"of {str(param.dtype).removeprefix('torch.')}"
        shard = type(param) not in PLAIN
        if param.layout is not torch.strided or (shard and not storages.has_plain_part(param)):
            return "not plain tensors"
        outermost = storages.is_dense(param) and (param.dim() < 2 or len(param) < 2 or param.stride(0) == row)
        if shard and (not outermost or storages.first_row(param) is None):
            return "in shards that aren't whole rows"
        if how == "bfloat16":
            return None
        if param.dim() < 2:
            return "of fewer than two dimensions"
        if param.numel() < _least_numbers:
            return f"of fewer than {_least_numbers:,} numbers"
        if row < LEAST_ROW:
            return f"with rows of fewer than {LEAST_ROW}"
        if not outermost:
            return "whose first dimension isn't outermost in memory"
        return None

    def moments(self, group: Group) -> tuple[str, ...]:
        """Return the names of the moments that a group's parameters have. Raises OptimizerError for amsgrad."""
        if "betas" not in group:
            return ("momentum_buffer",) if group["momentum"] else ()
        if group["amsgrad"]:
            raise OptimizerError(AMSGRAD.format(self.how))
        return ALL_MOMENTS[:2]

    def codes(self, param: Tensor, group: Group) -> bool:
        """Return True if a parameter has states that are coded."""
        return bool(self.moments(group)) and self.reason_for_float32(param) is None

    def row(self, param: Tensor) -> int:
        """Return the length of rows whose blocks have scales, of a parameter with codes of 8 bits; else 0."""
        return self._row(param) if self.reason_for_float32(param) is None else 0

    def prepare(self, param: Tensor, state: dict[str, Any], group: Group, number: int) -> Coding:
        """Make the states of a parameter that are missing, check them, and return what a kernel needs to know.

        Raises if the kernels can't take them.
        """
        self.make(param, state, group)
        for name, dtype in zip(self.moments(group), self._dtypes(param), strict=False):
            require_state(state[f"{name}_codes"], param, dtype)
        row = self._row(param)
        if row:
            require_state(state[SCALES], state[SCALES].new_empty(state[SCALES].shape, device=param.device))
        return Coding(state.get(SCALES), row, first_place(param), kernel.key_of(self.seed, number))

    def make(self, param: Tensor, state: dict[str, Any], group: Group) -> None:
        """Make the states of a parameter that are missing: zeros, or codes of float32 ones."""
        make_count(param, state)
        names = self.moments(group)
        if all(f"{name}_codes" in state for name in names):
            return
        if row := self._row(param):
            blocks = kernel.blocks_of(len(storages.local_part(param)), row)
            state[SCALES] = torch.zeros(blocks, len(names), dtype=torch.float32, device=param.device)
        for moment, (name, dtype) in enumerate(zip(names, self._dtypes(param), strict=False)):
            state[f"{name}_codes"] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
            if isinstance(value := state.pop(name, None), Tensor):
                _encode(param, state, moment, name, value, None)
            if type(param) not in PLAIN:
                state[name] = None  # torch's flattened files of shards have what these names are for

    def decoded(self, param: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a parameter's state with torch's float32 moments, under torch's names."""
        wide = {name: value for name, value in state.items() if name not in NAMES_OF_CODES}
        for moment, name in enumerate(name for name in ALL_MOMENTS if f"{name}_codes" in state):
            scales = state[SCALES][:, moment] if SCALES in state else None
            wide[name] = torch.empty_like(param, dtype=torch.float32, requires_grad=False)
            own, codes, decoded = map(storages.local_part, (param, state[f"{name}_codes"], wide[name]))
            kernel.decode(moment, _rows(own, codes, scales), scales, rows := _rows(own, decoded, scales))
            if rows.data_ptr() != decoded.data_ptr():
                write_in_memory_order(decoded, own, rows.view(-1))
        return wide

    def load(self, param: Tensor, state: dict[str, Any], group: Group) -> None:
        """Code the float32 moments that were loaded, to nearest."""
        if any(isinstance(state.get(name), Tensor) for name in ALL_MOMENTS) and self.codes(param, group):
            self.make(param, state, group)

    @torch.no_grad()
    def step_by_torch(self, optimizer: Any, multiplier: Tensor | None) -> None:
        """Take a step by torch's optimizer, on one parameter's decoded states after the other's."""
        number = -1
        for group in optimizer.param_groups:
            for param in group["params"]:
                number += 1
                if param.grad is None:
                    continue
                coded, state = self.codes(param, group), optimizer.state[param]
                optimizer.state[param] = self.decoded(param, state)
                if coded and family_of(optimizer) is SGD:
                    make_count(param, optimizer.state[param])
                step_on_masters(optimizer, self.masters(), multiplier, param)
                if not coded:
                    continue
                after = optimizer.state[param]
                wide = {name: after.pop(name) for name in self.moments(group) if after.get(name) is not None}
                self.make(param, after, group)
                beta = group["momentum"] if family_of(optimizer) is SGD else group["betas"][0]
                key, step = kernel.key_of(self.seed, number), int(after["step"])
                rounding = Rounding(first_place(param), key, step, float(beta) > LONG_MEMORY)
                for moment, (name, value) in enumerate(wide.items()):
                    _encode(param, after, moment, name, value, rounding)

    def describe(self, optimizer: Any) -> str:
        """Return in words what the states take, and which are float32."""
        count, numbers, held = Counter[str](), 0, 0.0
        for group in optimizer.param_groups:
            for param in group["params"]:
                wide = self.reason_for_float32(param)
                numbers, held = numbers + param.numel(), held + self.bytes_of(param, group)
                count.update([wide] if wide else [])
        float32 = "".join(f"; float32 for {n} parameters {reason}" for reason, n in count.items())
        how = " and ".join(dict.fromkeys(map(self.of, parameters(optimizer))))
        return f"{how}, {held / max(1, numbers):.2f} bytes a parameter{float32}"

    def bytes_of(self, param: Tensor, group: Group) -> int:
        """Return what the moments of a parameter, or momentum, take."""
        row = self.row(param)
        size = 4 if self.reason_for_float32(param) else self._dtypes(param)[0].itemsize
        return len(self.moments(group)) * (size * param.numel() + 4 * (kernel.blocks_of(len(param), row) if row else 0))

    def _row(self, param: Tensor) -> int:
        return numbers_of_a_row(param) if self.of(param) == "8bit" and param.dim() > 1 else 0

    def _dtypes(self, param: Tensor) -> tuple[torch.dtype, torch.dtype]:
        dtypes = TYPES[self.of(param)]
        assert dtypes is not None
        return dtypes


def _encode(
    param: Tensor, state: dict[str, Any], moment: int, name: str, value: Tensor, rounding: Rounding | None
) -> None:
    own, value, codes = map(storages.local_part, (param, value, state[f"{name}_codes"]))
    scales = state[SCALES][:, moment] if SCALES in state else None
    rows = _rows(own, codes, scales)
    kernel.encode(moment, _rows(own, value, scales), rows, scales, rounding)
    if rows.data_ptr() != codes.data_ptr():
        write_in_memory_order(codes, own, rows.reshape(-1))


def _rows(own: Tensor, tensor: Tensor, scales: Tensor | None) -> Tensor:
    flat = in_memory_order(tensor, own)
    return flat[None] if scales is None else flat.view(len(own), own[:1].numel())


def bytes_of(optimizer: Any) -> int:
    """Return what parameters, gradients of their types and all that is kept between steps take together."""
    held, masters, coder = 0, masters_of(optimizer), states_of(optimizer)
    for group in optimizer.param_groups:
        count = 2 + bool(group["amsgrad"]) if "betas" in group else bool(group["momentum"])
        for param in group["params"]:
            beside = masters.bytes_beside(param) if masters is not None and param.dtype in NARROW else 0
            states = 4 * count * param.numel() if coder is None else coder.bytes_of(param, group)
            held += 2 * param.nbytes + beside + states
    return held


def states_of(optimizer: Any) -> States | None:
    """Return the way in which an optimizer codes its states, if it does."""
    return getattr(getattr(optimizer, "_ampcompile_step", None), "states", None)


def chosen_states(optimizer: Any, how: Any, masters: str | None, names: Any = None) -> dict[int, str]:
    """Return the states of each parameter, by its id, if patterns of names choose them: those of a module, or torch's.

    Raises unless an optimizer can keep its states so.
    """
    values = list(how.values()) if isinstance(how, Mapping) else [how]
    if not values or not all(isinstance(value, str) and value in TYPES for value in values):
        kinds = ", ".join(map(repr, TYPES))
        raise OptimizerError(f"found states={how!r}; expected one of {kinds}, or a dict of them by names of parameters")
    if states_of(optimizer) is not None:
        raise OptimizerError("found an optimizer whose states are coded; expected one keep_masters() for each")
    if how == "float32":
        return {}
    for group in optimizer.param_groups:
        if group["differentiable"]:
            raise OptimizerError(f"found differentiable=True with states={how!r}; expected an optimizer without it")
        if group.get("amsgrad"):
            raise OptimizerError(AMSGRAD.format(how))
    for param in parameters(optimizer):
        if param.is_complex():
            raise OptimizerError(f"found a parameter of {param.dtype} with states={how!r}; expected real numbers")
        if param.dtype in NARROW and masters is None:
            raise OptimizerError(
                f"found a parameter of {param.dtype} with states={how!r} without masters; expected masters, without "
                'which small updates are rounded away: add masters="remainder"'
            )
    if "8bit" in values and any(storages.is_managed_by_fsdp(param, {}) for param in parameters(optimizer)):
        warn_user(
            "found FSDP1's flat parameters with states in 8 bits, expected parameters of two dimensions: their states "
            "stay float32. Shard by fully_shard"
        )
    return _by_names(optimizer, how, names) if isinstance(how, Mapping) else {}


def _by_names(optimizer: Any, how: Mapping[str, str], names: Any) -> dict[int, str]:
    if names is None:
        groups = [group for group in optimizer.param_groups if "param_names" in group]
        named = [pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)]
    else:
        model = names.module if isinstance(names, torch.nn.parallel.DistributedDataParallel) else names
        if not isinstance(model, torch.nn.Module):
            raise OptimizerError(f"found names of type {type(names).__name__}, expected the model that has them")
        named = list(model.named_parameters(remove_duplicate=False))
    names_of = defaultdict[int, list[str]](list)
    for name, param in named:
        names_of[id(param)].append(optimizers.plain_name(name))
    if missing := [param for param in parameters(optimizer) if id(param) not in names_of]:
        raise OptimizerError(
            f"found states={how!r} and {len(missing)} parameters without names; expected names: give the optimizer "
            "model.named_parameters(), or names=model"
        )
    known = [name for names in names_of.values() for name in names]
    if unused := [pattern for pattern in how if not fnmatch.filter(known, pattern)]:
        raise OptimizerError(
            f"found the pattern {unused[0]!r} in states, which fits no parameter; expected one that does, as "
            f"{known[0]!r} or '*'"
        )
    return {key: _first_fit(how, names) for key, names in names_of.items()}


def _first_fit(how: Mapping[str, str], names: Sequence[str]) -> str:
    fits = (kind for pattern, kind in how.items() if any(fnmatch.fnmatchcase(name, pattern) for name in names))
    return next(fits, "float32")
