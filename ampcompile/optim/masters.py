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
from ampcompile.kernels.tables import SPAN
from ampcompile.torch_private import optimizers, storages
from ampcompile.torch_private.storages import Living

from .plan import NARROW, PLAIN, parameters, require_state

STATES: dict[str, dict[str, torch.dtype | None]] = {
    "remainder": {"remainder": torch.int16, "checksums": torch.int32, "master_param": None},
    "float32": {"master_param": torch.float32},
    "stochastic": {"rounding_key": torch.int64},
}
"""The names in the optimizer's state, with their types, by the way of keeping masters.

Beside remainders `master_param` is None: the name under which files have both, and by which torch looks for it when it
loads a flattened one.
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

    def prepare(self, optimizer: Any, params: Collection[Tensor]) -> dict[str, list[Tensor | None]]:
        """Make what is kept beside those parameters, where it is missing; return it as a fused step takes it.

        Raises if the kernels can't take it.
        """
        chosen, others = set(map(id, params)), states_elsewhere(optimizer, self.how)
        rows: dict[str, list[Tensor | None]] = {"kept": [], "checksums": []}
        for number, param in enumerate(parameters(optimizer)):
            if id(param) not in chosen:
                continue
            kept, checksums = None, None
            if param.dtype in NARROW:
                self.make(param, state := optimizer.state[param], number, others[id(param)])
                kept, checksums = self.kept(state)
                like = kept.new_empty(3, device=param.device) if self.how == "stochastic" else param
                require_state(kept, like, kept.dtype)
                if checksums is not None:
                    require_state(checksums, checksums.new_empty(_spans(param), device=param.device), torch.int32)
            rows["kept"].append(kept)
            rows["checksums"].append(checksums)
        return rows

    def make(self, param: Tensor, state: dict[str, Any], number: int, others: list[dict[str, Any]]) -> None:
        """Make what is kept beside a 16-bit parameter, the `number`-th of its optimizer, where it is missing.

        `others`: states of the same parameter in other optimizers. They and `state` end up with the same tensors.
        """
        require_kind(param, self.how)
        if not self.is_kept(state):
            master = state.get("master_param")
            loaded = isinstance(master, Tensor) and master.dtype == torch.float32
            if not loaded and (known := next(filter(self.is_kept, others), None)) is not None:
                self.share(known, [state])
            elif self.how == "float32":
                state["master_param"] = param.detach().float()
            elif self.how == "stochastic":
                key = torch.tensor([self.seed, number, 0], device="cpu")
                state["rounding_key"] = key.to(param.device, non_blocking=True)
            else:
                _keep_remainders(param.detach(), state, master if loaded else None)
        drop_names(state, STATES[self.how])
        self.share(state, [state, *others])

    def share(self, state: dict[str, Any], others: list[dict[str, Any]]) -> None:
        """Let other states of a parameter have the same tensors."""
        for other in others:
            other.update({name: state.get(name) for name in STATES[self.how]})

    def is_kept(self, state: dict[str, Any]) -> bool:
        """Return True if a parameter's state has what is kept beside it, in its type."""
        return all(getattr(state.get(name), "dtype", None) == dtype for name, dtype in STATES[self.how].items())

    def kept(self, state: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return what is kept beside a parameter, and the checksums of remainders."""
        name, *_ = STATES[self.how]
        return state[name], state["checksums"] if self.how == "remainder" else None

    def read_weight(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the float32 weights of a 16-bit parameter; of a DTensor, a DTensor."""
        master = torch.empty_like(param, dtype=torch.float32)
        part, own, kept, checksums = map(storages.local_part, (master, param, *self.kept(state)))
        if checksums is None:
            part.copy_(read_master(own, kept, None))
        else:
            for weights, bits, lows, sums in _pieces(own, checksums, part, own, kept):
                weights.copy_(read_master(bits, lows, sums))
        return master

    def write_weight(self, param: Tensor, state: dict[str, Any], weight: Tensor) -> None:
        """Round float32 weights to their parameter, and keep the rest beside it."""
        write_master(*map(storages.local_part, (param, *self.kept(state), weight)))
        torch.autograd.graph.increment_version(param)

    def with_master(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter's state as files have it: a remainder and its parameter are one master there."""
        if self.how != "remainder" or not self.is_kept(state):
            return state
        others = {name: value for name, value in state.items() if name not in NAMES}
        return {**others, "master_param": self.read_weight(param, state)}

    def load(self, param: Tensor, state: dict[str, Any], others: list[dict[str, Any]]) -> None:
        """Keep what a file has beside a 16-bit parameter, in this way.

        A master is younger than remainders beside it, which were left in older files.
        """
        if self.how == "remainder" and isinstance(master := state.get("master_param"), Tensor):
            _keep_remainders(param.detach(), state, master)
        drop_names(state, STATES[self.how])
        if self.is_kept(state):
            self.share(state, [state, *others])

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
            if keeper.how != how:
                raise OptimizerError(
                    f"found a parameter of shape {tuple(param.shape)} in two optimizers, {type(other).__name__} with "
                    f"how={keeper.how!r} and {type(optimizer).__name__} with how={how!r}; expected one way of keeping "
                    "its masters: give both the same `how`"
                )
            if how != "stochastic" and param in other.state:
                found[id(param)].append(other.state[param])
    return found


def require_kind(param: Tensor, how: str) -> None:
    """Raise unless a 16-bit parameter can be kept so."""
    plain = type(param) in PLAIN or (how == "remainder" and storages.include_dtensors([param]))
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
    for number, param in enumerate(parameters(optimizer)):
        if param.grad is None or (only is not None and param is not only):
            continue
        state = states[param] = dict(optimizer.state[param])
        weight = param.detach()
        if masters is not None and others is not None and param.dtype in NARROW:
            masters.make(param, state, number, others[id(param)])
            weight = masters.read_weight(weight, state)
        weight.grad = param.grad.to(weight.dtype)
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
        if masters is not None and param.dtype in NARROW:
            drop_names(state, STATES[masters.how])
            if masters.how == "stochastic":
                state["rounding_key"][2] += 1
            masters.write_weight(param, state, weight)


def _keep_remainders(param: Tensor, state: dict[str, Any], master: Tensor | None) -> None:
    """Divide a master that was loaded, or begin without remainders.

    The master counts where it rounds to its parameter. In a span where anything else differs than how ties are rounded
    the parameters may still be loaded: there remainders wait for those that the master rounds to.
    """
    state["remainder"] = remainder = torch.zeros_like(param, dtype=torch.int16)
    state["checksums"] = checksums = torch.zeros(_spans(param), dtype=torch.int32, device=param.device)
    state["master_param"] = None
    if master is None or (parts := storages.local_parts([param, remainder, master], [param] * 3)) is None:
        return
    weight, *others = parts
    for lows, weights, masters, sums in _pieces(weight, checksums, others[0], weight, others[1]):
        write_master(rounded := torch.empty_like(weights), lows, sums, masters)
        same = rounded.view(torch.int16) == weights.view(torch.int16)
        if not same.all():
            fits = same | (masters.to(weights.dtype) == weights)
            spans = torch.nn.functional.pad(fits, (0, -len(fits) % SPAN), value=True).view(-1, SPAN).all(1)
            replaced = spans.repeat_interleave(SPAN)[: len(fits)] & ~same
            write_master(rounded, lows, sums, torch.where(replaced, weights.float(), masters))


def _pieces(param: Tensor, checksums: Tensor, written: Tensor, *read: Tensor) -> Iterator[list[Tensor]]:
    """The numbers of tensors, in the order of a parameter's memory, in pieces, with the checksums of their spans."""
    rows = [in_memory_order(tensor, param) for tensor in (written, *read)]
    for start in range(0, param.numel(), PIECE):
        sums = checksums[start // SPAN : (start + PIECE) // SPAN]
        yield [*(row[start : start + PIECE] for row in rows), sums]
    if rows[0].data_ptr() != written.data_ptr():
        write_in_memory_order(written, param, rows[0])


def _spans(param: Tensor) -> int:
    return -(-storages.local_part(param).numel() // SPAN)
