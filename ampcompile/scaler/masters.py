"""The state beside 16-bit parameters whose optimizer keeps masters: made, read, and loaded without loss."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampcompile.errors import ScalerError
from ampcompile.kernels.masters import read_master, write_master
from ampcompile.kernels.triton.tables import SPAN
from ampcompile.torch_private import dtensors

from .conditions import PLAIN, require_state
from .pending import parameters

STATES = {"remainder": ("remainder", "checksums"), "float32": ("master_param",), "stochastic": ("rounding_key",)}
"""The names in the optimizer's state, by the way of keeping masters."""
NAMES = {name for names in STATES.values() for name in names}
NARROW = (torch.bfloat16, torch.float16)


@dataclass(eq=False)
class Masters:
    """The way in which an optimizer keeps masters."""

    how: str
    seed: int
    saved: dict[str, Any] = field(default_factory=dict)
    """The state that is being loaded"""

    def widen_states(self, optimizer: Any) -> None:
        """Make state that torch made in the 16-bit type of its parameter float32."""
        for param in parameters(optimizer):
            state = optimizer.state.get(param, {}) if param.dtype in NARROW else {}
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dtype in NARROW:
                    state[name] = value.float()

    def prepare(self, optimizer: Any, params: Collection[Tensor]) -> None:
        """Make what is kept beside those 16-bit parameters, where it is missing; raise if the kernels can't take it."""
        chosen = set(map(id, params))
        for number, param in enumerate(parameters(optimizer)):
            if param.dtype in NARROW and id(param) in chosen:
                state = optimizer.state[param]
                self.make(param, state, number)
                kept, checksums = self.kept(state)
                if self.how == "stochastic":
                    require_state(kept, kept.new_empty(3, device=param.device), torch.int64)
                else:
                    require_state(kept, param, kept.dtype)
                if checksums is not None:
                    require_state(checksums, checksums.new_empty(_spans(param), device=param.device), torch.int32)

    def make(self, param: Tensor, state: dict[str, Any], number: int) -> None:
        """Make what is kept beside a 16-bit parameter, the `number`-th of its optimizer, where it is missing."""
        require_kind(param, self.how)
        dtypes = {name: getattr(value, "dtype", None) for name, value in state.items()}
        if self.how == "float32":
            if dtypes.get("master_param") != torch.float32:
                state["master_param"] = param.detach().float()
        elif self.how == "remainder":
            if dtypes.get("remainder") != torch.int16 or dtypes.get("checksums") != torch.int32:
                state["remainder"] = torch.zeros_like(param, dtype=torch.int16)
                state["checksums"] = torch.zeros(_spans(param), dtype=torch.int32, device=param.device)
                if dtypes.get("master_param") == torch.float32:
                    _split(param.detach(), state, state.pop("master_param"))
        elif dtypes.get("rounding_key") != torch.int64:
            state["rounding_key"] = torch.tensor([self.seed, number, 0], device="cpu").to(
                param.device, non_blocking=True
            )

    def kept(self, state: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return what is kept beside a parameter, and the checksums of remainders."""
        return state[STATES[self.how][0]], state["checksums"] if self.how == "remainder" else None

    def read_weight(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the float32 weights of a 16-bit parameter; of a DTensor, a DTensor."""
        master = torch.empty_like(param, dtype=torch.float32)
        parts = map(dtensors.local_part, (param, *self.kept(state)))
        dtensors.local_part(master).copy_(read_master(*parts))
        return master

    def write_weight(self, param: Tensor, state: dict[str, Any], weight: Tensor) -> None:
        """Round float32 weights to their parameter, and keep the rest beside it."""
        write_master(*map(dtensors.local_part, (param, *self.kept(state), weight)))
        torch.autograd.graph.increment_version(param)

    def read(self, states: Iterable[Any], params: Iterable[Tensor]) -> dict[str, list[Tensor | None]]:
        """Return the same of all parameters as a fused step takes it; fails if something is missing.

        `states`: the parameters'.
        """
        rows = [
            self.kept(state) if param.dtype in NARROW else (None, None)
            for state, param in zip(states, params, strict=True)
        ]
        return {"kept": [kept for kept, _ in rows], "checksums": [checksums for _, checksums in rows]}

    def save_whole(self, optimizer: Any, saved: dict[str, Any]) -> None:
        """Save whole masters of DTensors: others may load them on other ranks, where no checksum would be right."""
        for number, param in _numbered(optimizer, saved):
            state = saved["state"].get(number, {})
            if "remainder" in state and dtensors.includes([param]):
                others = {name: value for name, value in state.items() if name not in NAMES}
                saved["state"][number] = {**others, "master_param": self.read_weight(param.detach(), state)}

    def note_saved(self, _: Any, saved: dict[str, Any]) -> None:
        """Remember what is being loaded: torch converts it to the parameters' type."""
        self.saved = saved

    def restore_saved(self, optimizer: Any) -> None:
        """Load the state of 16-bit parameters again, with its precision."""
        saved, self.saved = self.saved, {}
        for number, param in _numbered(optimizer, saved):
            for name, value in saved["state"].get(number, {}).items():
                if param.dtype in NARROW and isinstance(value, Tensor) and name != "step":
                    dtype = torch.float32 if value.is_floating_point() else value.dtype
                    optimizer.state[param][name] = value.to(param.device, dtype, copy=True)


def masters_of(optimizer: Any) -> Masters | None:
    """Return the way in which an optimizer keeps masters, if it does; it is its step."""
    step = getattr(optimizer, "step", None)
    return step if isinstance(step, Masters) else None


def require_kind(param: Tensor, how: str) -> None:
    """Raise unless a 16-bit parameter can be kept so."""
    plain = type(param) in PLAIN or (how == "remainder" and dtensors.includes([param]))
    if how != "float32" and (param.dtype == torch.float16 or not plain):
        raise ScalerError(
            f"found a {type(param).__name__} of {param.dtype} with how={how!r}, expected plain tensors of bfloat16: "
            "how='float32' takes others"
        )


def _split(param: Tensor, state: dict[str, Any], master: Tensor) -> None:
    """Keep the remainders of a master that was loaded, where it rounds to its parameter."""
    if (parts := dtensors.local_parts([param, master], [param, param])) is not None:
        param, master = parts
        beside = dtensors.local_part(state["remainder"]), state["checksums"]
        write_master(rounded := torch.empty_like(param), *beside, master)
        same = rounded.view(torch.int16) == param.view(torch.int16)
        write_master(rounded, *beside, torch.where(same, master, param.float()))


def _spans(param: Tensor) -> int:
    return -(-dtensors.local_part(param).numel() // SPAN)


def _numbered(optimizer: Any, saved: dict[str, Any]) -> Iterable[tuple[int, Tensor]]:
    """The parameters with their numbers in what `state_dict` returned."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    return zip(numbers, parameters(optimizer), strict=True)
