"""The state beside 16-bit parameters whose optimizer keeps masters: made, read, and loaded without loss."""

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampcompile.errors import OptimizerError
from ampcompile.kernels.masters import in_memory_order, read_master, write_in_memory_order, write_master
from ampcompile.kernels.states import Coding, Rounding, blocks_of, key_of
from ampcompile.kernels.tables import SPAN
from ampcompile.torch_private import optimizers, storages
from ampcompile.torch_private.storages import Living

from .plan import NARROW, PLAIN, SGD, family_of, parameters, require_state

STATES: dict[str, dict[str, torch.dtype | None]] = {
    "remainder": {"remainder": torch.int16, "checksums": torch.int32, "master_param": None},
    "remainder8": {"remainder": torch.int8, "checksums": torch.int32, "master_param": None},
    "float32": {"master_param": torch.float32},
    "stochastic": {"rounding_key": torch.int64},
}
"""The names in the optimizer's state, with their types, by the way of keeping masters.

Beside remainders `master_param` is None: files have parameter and remainder as one master under that name, and torch
looks for it by that name when it loads a flattened file.
"""
NAMES = {name for names in STATES.values() for name in names}
PIECE = 512 * SPAN  # so many numbers are divided, or put together, at a time: the temporaries of more would show
KEEPERS: "Living[Masters]" = Living()  # the masters of all optimizers


@dataclass(eq=False)
class Masters:
    """The way in which an optimizer keeps masters."""

    how: str
    seed: int
    optimizer: Callable[[], Any]

    def widen_states(self, optimizer: Any) -> None:
        """Make state that torch made in the 16-bit type of its parameter float32."""
        for param in parameters(optimizer):
            state = optimizer.state.get(param, {}) if param.dtype in NARROW else {}
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dtype in NARROW and not name.endswith("_codes"):
                    state[name] = value.float()

    def prepare(self, optimizer: Any, params: Collection[Tensor]) -> dict[str, list[Any]]:
        """Make what is kept beside those parameters, where it is missing; return it as a fused step takes it.

        Raises if the kernels can't take it.
        """
        chosen, others = set(map(id, params)), states_elsewhere(optimizer, self.how)
        rows: dict[str, list[Any]] = {"kept": [], "checksums": [], "coding": []}
        for number, param in enumerate(parameters(optimizer)):
            if id(param) not in chosen:
                continue
            kept, checksums, coding = None, None, None
            if param.dtype in NARROW:
                self.make(param, state := optimizer.state[param], number, others[id(param)])
                kept, checksums = self.kept(state)
                like = kept.new_empty(3, device=param.device) if self.how == "stochastic" else param
                require_state(kept, like, kept.dtype)
                if checksums is not None:
                    require_state(checksums, checksums.new_empty(len(checksums), device=param.device), torch.int32)
                if self.how != "stochastic":
                    coding = self.coding(param, number)
            for row, value in zip(rows.values(), (kept, checksums, coding), strict=True):
                row.append(value)
        return rows

    def row(self, param: Tensor) -> int:
        """Return the length of rows that the spans of checksums lie in, as codes of 8 bits do; else 0."""
        coder = self.optimizer()._ampcompile_step.states
        return 0 if coder is None else coder.row(param)

    def coding(self, param: Tensor, number: int) -> Coding:
        """Return what a kernel needs to know to round the master of the `number`-th parameter."""
        return Coding(None, self.row(param), first_place(param), key_of(self.seed, number))

    def make(self, param: Tensor, state: dict[str, Any], number: int, others: list[dict[str, Any]]) -> None:
        """Make what is kept beside a 16-bit parameter, the `number`-th of its optimizer, where it is missing.

        `others`: states of the same parameter in other optimizers. They and `state` end up with the same tensors.
        """
        require_kind(param, self.how)
        if self.how != "stochastic" and family_of(self.optimizer()) is SGD:
            make_count(param, state)
        if not self.is_kept(param, state):
            master = state.get("master_param")
            loaded = isinstance(master, Tensor) and master.dtype == torch.float32
            known = [] if loaded else [other for other in others if self.is_kept(param, other)]
            if known:
                self.share(known[0], [state])
            elif self.how == "float32":
                state["master_param"] = param.detach().float()
            elif self.how == "stochastic":
                key = torch.tensor([self.seed, number, 0], device="cpu")
                state["rounding_key"] = key.to(param.device, non_blocking=True)
            else:
                self.keep_remainders(param.detach(), state, master if loaded else None)
        drop_names(state, STATES[self.how])
        self.share(state, [state, *others])

    def share(self, state: dict[str, Any], others: list[dict[str, Any]]) -> None:
        """Let other states of a parameter have the same tensors."""
        for other in others:
            other.update({name: state.get(name) for name in STATES[self.how]})

    def bytes_beside(self, param: Tensor) -> int:
        """Return what is kept beside a 16-bit parameter."""
        if self.how == "stochastic":
            return 24
        spans = 4 * _spans(param, self.row(param)) if "checksums" in STATES[self.how] else 0
        return param.numel() * next(dtype.itemsize for dtype in STATES[self.how].values() if dtype) + spans

    def is_kept(self, param: Tensor, state: dict[str, Any]) -> bool:
        """Return True if a parameter's state has what is kept beside it, in its type."""
        names = STATES[self.how]
        typed = all(getattr(state.get(name), "dtype", None) == dtype for name, dtype in names.items())
        return typed and ("checksums" not in names or state["checksums"].shape == (_spans(param, self.row(param)),))

    def kept(self, state: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return what is kept beside a parameter, and the checksums of remainders."""
        name, *others = STATES[self.how]
        return state[name], state["checksums"] if others else None

    def read_weight(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the float32 weights of a 16-bit parameter; of a DTensor, a DTensor."""
        master = torch.empty_like(param, dtype=torch.float32)
        part, own, kept, checksums = map(storages.local_part, (master, param, *self.kept(state)))
        if checksums is None:
            part.copy_(read_master(own, kept, None))
        else:
            row = self.row(param)
            for weights, bits, lows, sums in _pieces(own, checksums, row, part, own, kept):
                weights.copy_(read_master(bits, lows, sums, row))
        return master

    def write_weight(self, param: Tensor, state: dict[str, Any], weight: Tensor, number: int) -> None:
        """Round float32 weights to their parameter, the `number`-th, in a step, and keep the rest beside it."""
        _, row, first, key = self.coding(param, number)
        rounding = Rounding(first, key, int(state["step"]), True) if self.how == "remainder8" else None
        own, kept, checksums, wide = map(storages.local_part, (param, *self.kept(state), weight))
        write_master(own, kept, checksums, wide, row, rounding)
        torch.autograd.graph.increment_version(param)

    def with_master(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter's state as files have it: a remainder and its parameter are one master there."""
        if "checksums" not in STATES[self.how] or not self.is_kept(param, state):
            return state
        others = {name: value for name, value in state.items() if name not in NAMES}
        return {**others, "master_param": self.read_weight(param, state)}

    def load(self, param: Tensor, state: dict[str, Any], others: list[dict[str, Any]]) -> None:
        """Keep what a file has beside a 16-bit parameter, in this way.

        Older files have remainders, of 16 bits. A master beside them is younger, and counts.
        """
        if "checksums" in STATES[self.how]:
            remainder, checksums, master = map(state.get, STATES[self.how])
            if master is None and isinstance(remainder, Tensor) and not self.is_kept(param, state):
                fits = isinstance(checksums, Tensor) and checksums.shape == (_spans(param, 0),)
                master = read_master(param.detach(), remainder, checksums if fits else None)
            if isinstance(master, Tensor):
                self.keep_remainders(param.detach(), state, master)
        drop_names(state, STATES[self.how])
        if self.is_kept(param, state):
            self.share(state, [state, *others])

    def keep_remainders(self, param: Tensor, state: dict[str, Any], master: Tensor | None) -> None:
        """Divide a master that was loaded, or begin without remainders.

        The master counts where it rounds to its parameter. Where a span differs in more than the rounding of ties, its
        parameters may still be loaded later: its remainders are those of the parameters that the master rounds to.
        """
        row = self.row(param)
        state["remainder"] = remainder = torch.zeros_like(param, dtype=STATES[self.how]["remainder"])
        state["checksums"] = checksums = torch.zeros(_spans(param, row), dtype=torch.int32, device=param.device)
        state["master_param"] = None
        if master is None or (parts := storages.local_parts([param, remainder, master], [param] * 3)) is None:
            return
        own, *others = parts
        for lows, weights, masters, sums in _pieces(own, checksums, row, others[0], own, others[1]):
            write_master(rounded := torch.empty_like(weights), lows, sums, masters, row)
            same = rounded.view(torch.int16) == weights.view(torch.int16)
            if not same.all():
                fits = (same | (masters.to(weights.dtype) == weights)).view(-1, row or len(same))
                spans = torch.nn.functional.pad(fits, (0, -fits.shape[1] % SPAN), value=True).view(-1, SPAN).all(1)
                fit = spans.repeat_interleave(SPAN).view(len(fits), -1)[:, : fits.shape[1]].flatten()
                write_master(rounded, lows, sums, torch.where(fit & ~same, weights.float(), masters), row)

    def remove_from(self, param: Tensor, states: Any) -> None:
        """Take what is kept out of a parameter's state, whose other tensors get the parameter's type."""
        if param.dtype in NARROW:
            drop_names(state := states[param])
            for name, value in state.items():
                if isinstance(value, Tensor) and name != "step":
                    state[name] = value.to(param.dtype)


def require_possible(optimizer: torch.optim.Optimizer, how: str) -> None:
    """Raise unless an optimizer can keep masters so."""
    if how not in STATES:
        raise OptimizerError(f"found how={how!r}; expected one of {', '.join(map(repr, STATES))}")
    if masters_of(optimizer) is not None:
        raise OptimizerError("found an optimizer that keeps masters already; expected one keep_masters() for each")
    if any(group["differentiable"] for group in optimizer.param_groups):
        raise OptimizerError("found differentiable=True; expected an optimizer without it: masters have no gradients")
    narrow = [param for param in parameters(optimizer) if param.dtype in NARROW]
    if not narrow:
        raise OptimizerError("found no 16-bit parameter; expected some: float32 parameters need no masters")
    for param in narrow:
        require_kind(param, how)
    states_elsewhere(optimizer, how)


def checked(seed: Any) -> int:
    """Return the seed; raise unless it is an integer of 64 bits."""
    try:
        if -(2**63) <= (number := operator.index(seed)) < 2**63:
            return number
    except TypeError:
        pass
    raise OptimizerError(f"found seed={seed!r}; expected an integer of 64 bits, from -2**63 to 2**63 - 1")


def masters_of(optimizer: Any) -> Masters | None:
    """Return the way in which an optimizer keeps masters, if it does."""
    return getattr(getattr(optimizer, "_ampcompile_step", None), "masters", None)


def drop_names(state: dict[str, Any], own: Collection[str] = ()) -> None:
    """Drop what other ways than one with these names keep beside a parameter: it would win when a file is loaded."""
    for name in NAMES.difference(own):
        state.pop(name, None)


def states_elsewhere(optimizer: Any, how: str) -> defaultdict[int, list[dict[str, Any]]]:
    """Return the states, by the parameter's id, in which other optimizers keep masters of the same 16-bit parameters.

    None where masters are random bits, as there are no two that must agree. Raises OptimizerError if masters of one
    parameter would be kept in two ways.
    """
    found: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    own = {id(param) for param in parameters(optimizer) if param.dtype in NARROW}
    for keeper in list(KEEPERS):
        if (other := keeper.optimizer()) is None or other is optimizer:
            continue
        for param in parameters(other):
            if id(param) not in own:
                continue
            own_masters = masters_of(optimizer)
            if keeper.how != how or (own_masters and keeper.row(param) != own_masters.row(param)):
                raise OptimizerError(
                    f"found a parameter of shape {tuple(param.shape)} in two optimizers, {type(other).__name__} with "
                    f"how={keeper.how!r} and {type(optimizer).__name__} with how={how!r}; expected one way of keeping "
                    "its masters: give both the same `how`, and the same `states`"
                )
            if how != "stochastic" and param in other.state:
                found[id(param)].append(other.state[param])
    return found


def require_kind(param: Tensor, how: str) -> None:
    """Raise unless a 16-bit parameter can be kept so."""
    plain = type(param) in PLAIN or ("checksums" in STATES[how] and storages.include_dtensors([param]))
    if how != "float32" and (param.dtype == torch.float16 or not plain):
        raise OptimizerError(
            f"found a {type(param).__name__} of {param.dtype} with how={how!r}, expected plain tensors of bfloat16: "
            "how='float32' takes others"
        )


@torch.no_grad()
def step_on_masters(
    optimizer: Any, masters: Masters | None, multiplier: Tensor | None, only: Tensor | None = None
) -> None:
    """Take a step by an optimizer of torch's on temporary float32 weights; of one parameter if that is given."""
    others = None if masters is None else states_elsewhere(optimizer, masters.how)
    if masters is not None:
        masters.widen_states(optimizer)
    weights: dict[Tensor, Tensor] = {}
    states: dict[Tensor, dict[str, Any]] = {}
    numbers: dict[Tensor, int] = {}
    for number, param in enumerate(parameters(optimizer)):
        if param.grad is None or (only is not None and param is not only):
            continue
        state, numbers[param] = dict(optimizer.state[param]), number
        states[param] = state
        weight = param.detach()
        if masters is not None and others is not None and param.dtype in NARROW:
            masters.make(param, state, number, others[id(param)])
            weight = masters.read_weight(weight, state)
        grad = param.grad.to(weight.dtype)
        if grad.layout is torch.strided and grad.stride() != weight.stride():  # torch's fused step doesn't see that
            grad = torch.empty_like(weight).copy_(grad)
        weight.grad = grad
        if multiplier is not None:
            weight.grad = weight.grad * multiplier.to(weight.device)
        weights[param] = weight
    groups = [
        {**group, "params": [weights[p] for p in group["params"] if p in weights]} for group in optimizer.param_groups
    ]
    torchs = optimizers.torchs_class(optimizer)(groups)
    for param, weight in weights.items():
        torchs.state[weight] = {name: value for name, value in states[param].items() if name not in NAMES}
    torchs.step()
    for param, weight in weights.items():
        state = optimizer.state[param]
        state.update(states[param])
        state.update(torchs.state[weight])
        if "step" in state and family_of(optimizer) is SGD:
            state["step"] += 1
        if masters is not None and param.dtype in NARROW:
            drop_names(state, STATES[masters.how])
            if masters.how == "stochastic":
                state["rounding_key"][2] += 1
            masters.write_weight(param, state, weight, numbers[param])


def make_count(param: Tensor, state: dict[str, Any]) -> None:
    """Make the count of a parameter's steps where its state has none, or has it elsewhere."""
    count = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32)
    state["step"] = count.to(param.device, non_blocking=True)


def _pieces(param: Tensor, checksums: Tensor, row: int, written: Tensor, *read: Tensor) -> Iterator[list[Tensor]]:
    """The numbers of tensors, in the order of a parameter's memory, in pieces, with the checksums of their spans."""
    rows = [in_memory_order(tensor, param) for tensor in (written, *read)]
    piece = max(1, PIECE // row) * row if row else PIECE
    spans = _spans(rows[0][:piece], row) if row else PIECE // SPAN
    for i, start in enumerate(range(0, param.numel(), piece)):
        yield [*(each[start : start + piece] for each in rows), checksums[i * spans : (i + 1) * spans]]
    if rows[0].data_ptr() != written.data_ptr():
        write_in_memory_order(written, param, rows[0])


def numbers_of_a_row(param: Tensor) -> int:
    """Return how many numbers lie behind the first dimension."""
    return param.numel() // max(1, len(param)) if param.dim() else 1


def first_place(param: Tensor) -> int:
    """Return the place of this rank's first number in the whole parameter."""
    return (storages.first_row(param) or 0) * numbers_of_a_row(param)


def _spans(param: Tensor, row: int) -> int:
    count = storages.local_part(param).numel()
    return blocks_of(count // row, row) // 2 if row else -(-count // SPAN)
