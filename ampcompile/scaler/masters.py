"""The state beside 16-bit parameters whose optimizer keeps masters: made, read, and loaded without loss."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampcompile.errors import ScalerError
from ampcompile.kernels.triton.tables import SPAN

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
        elif dtypes.get("rounding_key") != torch.int64:
            state["rounding_key"] = torch.tensor([self.seed, number, 0]).to(param.device, non_blocking=True)

    def kept(self, state: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return what is kept beside a parameter, and the checksums of remainders."""
        return state[STATES[self.how][0]], state["checksums"] if self.how == "remainder" else None

    def read(self, states: Iterable[Any], params: Iterable[Tensor]) -> dict[str, list[Tensor | None]]:
        """Return the same of all parameters as a fused step takes it; fails if something is missing.

        `states`: the parameters'.
        """
        rows = [
            self.kept(state) if param.dtype in NARROW else (None, None)
            for state, param in zip(states, params, strict=True)
        ]
        return {"kept": [kept for kept, _ in rows], "checksums": [checksums for _, checksums in rows]}

    def note_saved(self, _: Any, saved: dict[str, Any]) -> None:
        """Remember what is being loaded: torch converts it to the parameters' type."""
        self.saved = saved

    def restore_saved(self, optimizer: Any) -> None:
        """Load the state of 16-bit parameters again, with its precision."""
        saved, self.saved = self.saved, {}
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        for number, param in zip(numbers, parameters(optimizer), strict=True):
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
    if how != "float32" and (param.dtype == torch.float16 or type(param) not in PLAIN):
        raise ScalerError(
            f"found a {type(param).__name__} of {param.dtype} with how={how!r}, expected plain tensors of bfloat16: "
            "how='float32' takes others"
        )


def _spans(param: Tensor) -> int:
    return -(-param.numel() // SPAN)
