"""The fused step as an optimizer: `SGD`, `Adam` and `AdamW`, in place of torch's."""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ampcompile.errors import OptimizerError, warn_user
from ampcompile.torch_private import dispatcher, marks, optimizers

from .checkpoints import OWN_SETTINGS, drop_own_settings
from .fused_step import FusedStep, call_without_interrupt, step_of
from .masters import checked, require_possible
from .plan import move_step_counts_to_cpu, parameters
from .states import bytes_of, chosen_states, states_of

__all__ = ["SGD", "Adam", "AdamW"]


def _constructor(torchs: Any) -> Callable[..., None]:
    """Return torch's constructor, with our keywords added to its signature."""

    def __init__(
        self: Any,
        *args: Any,
        masters: str | None = None,
        states: str | Mapping[str, str] = "float32",
        names: torch.nn.Module | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        torchs.__init__(self, *args, **kwargs)
        own = {"masters": masters, "states": states, "seed": seed}
        drop_own_settings(self.param_groups, own)
        self._make_step(masters, seed, states=states, chosen=chosen_states(self, states, masters, names))
        self.defaults.update({name: value for name, value in own.items() if value != OWN_SETTINGS[name]})
        if masters is None and any(param.dtype == torch.bfloat16 for param in parameters(self)):
            warn_user(
                f"found bfloat16 parameters in {type(self).__name__} without masters, expected masters: small updates "
                'are rounded away. Add masters="remainder", or train float32 parameters'
            )

    own = list(inspect.signature(__init__).parameters.values())[2:-1]
    given = inspect.signature(torchs.__init__)
    vars(__init__).update(__signature__=given.replace(parameters=[*given.parameters.values(), *own]))
    return __init__


class FusedOptimizer(torch.optim.Optimizer):
    """What our SGD, Adam and AdamW share. Their methods find the step in an attribute: a wrapper that is made of an
    optimizer's class without its constructor looks attributes up in that optimizer.
    """

    _ampcompile_step: FusedStep

    def _make_step(
        self, masters: str | None, seed: int, exchanged: bool = False, states: Any = "float32", chosen: Any = ()
    ) -> None:
        seed, self._ampcompile_step = checked(seed), FusedStep(self, exchanged)
        if masters is not None:
            require_possible(self, masters)
            self._ampcompile_step.keep_masters(masters, seed)
        if states != "float32":
            self._ampcompile_step.code_states(states, seed, dict(chosen))
        if masters is not None or self.defaults.get("fused"):
            optimizers.mark_amp_aware(self)

    def __getstate__(self) -> dict[str, Any]:
        move_step_counts_to_cpu(self)
        masters = self._ampcompile_step.masters
        own: dict[str, Any] = {} if masters is None else {"_ampcompile_masters": (masters.how, masters.seed)}
        if (coder := states_of(self)) is not None:
            own["_ampcompile_states"] = coder.how, coder.seed, list(map(coder.of, parameters(self)))
        own |= {} if self.state_dict_device is None else {"_ampcompile_device": self.state_dict_device}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = ("_ampcompile_masters", "_ampcompile_states", "_ampcompile_exchanged", "_ampcompile_device")
        own = {name: state[name] for name in names if name in state}
        super().__setstate__({name: value for name, value in state.items() if name not in own})
        if not hasattr(self, "_ampcompile_step"):  # a copy; loading a state_dict, of a wrapper even, ends here, too
            states, seed, kinds = own.get("_ampcompile_states", ("float32", 0, ()))
            chosen = zip(map(id, parameters(self)), kinds, strict=False)
            masters, seed = own.get("_ampcompile_masters", (None, seed))
            self._make_step(masters, seed, own.get("_ampcompile_exchanged", False), states, chosen)
            self.state_dict_device = own.get("_ampcompile_device")

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        """Pickle, where it was torch's and has no state of ours, as torch's class, for processes without us."""
        step = self._ampcompile_step
        pickled_as = optimizers.torchs_class(self) if step.exchanged and step.plain else type(self)
        return object.__new__, (pickled_as,), self.__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = other = type(self).__new__(type(self))
        other.__setstate__(copy.deepcopy(self._state_of_copy(), memo))
        return other

    def __copy__(self) -> Any:
        other = type(self).__new__(type(self))
        other.__setstate__(self._state_of_copy())
        return other

    def _state_of_copy(self) -> dict[str, Any]:
        return {**self.__getstate__(), "_ampcompile_exchanged": self._ampcompile_step.exchanged}

    @marks.run_untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step by the fused kernels where they can, else torch's; see `torch.optim.Optimizer.step`."""
        if (step := step_of(self)) is None:
            raise OptimizerError(
                "found a step of an optimizer that is torch's again, expected it before the remove() of its masters: "
                "take optimizer.step anew"
            )
        return step.step(closure)

    vars(step).update(hooked=True)  # for torch, which else would call hooks around it once more

    def __repr__(self) -> str:
        """Torch's words, and whether the next step is fused."""
        step, coder = self._ampcompile_step, self._ampcompile_step.states
        numbers = sum(param.numel() for param in parameters(self))
        own = "" if coder is None else f"    states: {coder.describe(self)}\n"
        if coder or step.masters:
            own += f"    held: {bytes_of(self) / max(1, numbers):.2f} bytes a parameter, its gradient too\n"
        return f"{super().__repr__()[:-1]}    step: {step.describe()}\n{own})"

    @property
    def state_dict_device(self) -> str | None:
        """Where `state_dict` is made: None, on the parameters' devices, or "cpu", all of it, parameter by parameter."""
        return self._ampcompile_step.state_dict_device

    @state_dict_device.setter
    def state_dict_device(self, device: str | None) -> None:
        if device not in (None, "cpu"):
            raise OptimizerError(f"found state_dict_device={device!r}; expected 'cpu', or None for the parameters' own")
        self._ampcompile_step.state_dict_device = device

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see `torch.optim.Optimizer.add_param_group`. Its parameters have the optimizer's `masters`, and
        `states` by their names, if they have some.
        """
        step = step_of(self)  # None in the constructor
        if has_own := step is not None and not (step.exchanged and step.plain):
            drop_own_settings([param_group], self.defaults)
        super().add_param_group(param_group)
        if has_own:  # torch has added them
            drop_own_settings(self.param_groups[-1:], self.defaults)
        if step is not None and step.states is not None:
            step.states.add_group(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of torch's class or ours returned, by any `masters` and `states`.

        Model and optimizer may be loaded in either order. Masters are those of this optimizer; it takes the memory of
        the largest parameter's float32 beside the file. Raises OptimizerError, with nothing changed, for states of
        other names or shapes.
        """
        self._ampcompile_step.see_loads_last()
        super().load_state_dict(state_dict)

    @marks.run_untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and drop a clipping that waits, as for a step that a scaler of torch's skipped."""
        self._ampcompile_step.pending = None
        super().zero_grad(set_to_none)

    @marks.run_untraced
    @marks.named("amp: Optimizer.clip_grad_norm_")
    def clip_grad_norm_(
        self,
        max_norm: float | Tensor,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the gradients of this optimizer to a global norm of `max_norm` in its next `step`.

        `max_norm`: a number, or a tensor of one on the gradients' device, which isn't read by the host. As
        `torch.nn.utils.clip_grad_norm_`, it needs complete and unscaled gradients, and returns their norm before
        clipping, 0-dim, without a host sync. The step applies the clipping, and `.grad` stays as it is; gradients that
        the kernels can't take are clipped in place, and so are all if `norm_type` isn't 2. Raises OptimizerError, in
        the step, for gradients that changed in between, or that a scaler would have had to unscale before.
        """
        if isinstance(max_norm, Iterable) and not (isinstance(max_norm, Tensor) and max_norm.numel() == 1):
            raise OptimizerError(
                f"found {type(max_norm).__name__!r} as max_norm, expected a number: an optimizer clips those of "
                "its parameters; write optimizer.clip_grad_norm_(1.0)"
            )
        step = self._ampcompile_step
        optimizer = step.living_optimizer()
        step.end_iteration()
        can = float(norm_type) == 2 and optimizers.foreign_step(optimizer) is None and dispatcher.acting_mode() is None
        if can and (norm := step.measure(max_norm, error_if_nonfinite)) is not None:
            return norm
        step.apply_pending(optimizer)
        how: Any = max_norm, norm_type, error_if_nonfinite, foreach
        return nn.utils.clip_grad_norm_(parameters(optimizer), *how)


class SGD(FusedOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` whose step is a few fused kernels; see `AdamW`.

    >>> optimizer = ampcompile.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    """

    __init__ = _constructor(torch.optim.SGD)


class Adam(FusedOptimizer, torch.optim.Adam):
    """`torch.optim.Adam` whose step is a few fused kernels; see `AdamW`.

    >>> optimizer = ampcompile.optim.Adam(model.parameters(), lr=1e-3)
    """

    __init__ = _constructor(torch.optim.Adam)


class AdamW(FusedOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` whose step is a few fused kernels.

    Takes the same arguments, and has the same state and `state_dict`. Its step writes the copies of weights that
    compiled graphs read, together with the weights; docs/optimizer.md lists what differs. `masters`: for 16-bit
    weights, a way of `keep_masters`. `states`: "bfloat16" or "8bit" keep Adam's moments and momentum in fewer bits, in
    `optimizer.state` under other names; `state_dict` has torch's. Or patterns of names of parameters, as `{"*embed*":
    "float32", "*": "8bit"}`: the first that fits counts, what none fits is float32. The names are those of the module
    `names`, or torch's. Both round at random by `seed`. Raises OptimizerError for amsgrad with such states, for 16-bit
    parameters that have them without masters, and for patterns that fit nothing.

    >>> optimizer = ampcompile.optim.AdamW(model.parameters(), lr=1e-3)
    >>> compiled(x).square().mean().backward()
    >>> norm = optimizer.clip_grad_norm_(1.0)
    >>> optimizer.step()
    """

    __init__ = _constructor(torch.optim.AdamW)


OURS: dict[type, Any] = {kind.__mro__[2]: kind for kind in (SGD, Adam, AdamW)}
"""By torch's class"""
for _kind in OURS.values():
    optimizers.register(_kind)


def adopt(optimizer: Any) -> FusedStep | None:
    """Make an optimizer of exactly torch's SGD, Adam or AdamW one of ours: exchange its class. Returns its step.

    None, and the optimizer stays as it is, if it is another or its step isn't torch's.
    """
    if type(optimizer) not in OURS or optimizers.replaced_step(optimizer) is not None:
        return None
    step, kind = FusedStep(optimizer, exchanged=True), OURS[type(optimizer)]
    take_step = partial(setattr, optimizer, "_ampcompile_step", step)
    call_without_interrupt([take_step, *optimizers.exchange_class(optimizer, kind)])
    return step


def give_back(step: FusedStep) -> None:
    """Make an optimizer whose class was exchanged torch's again."""
    optimizer = step.living_optimizer()
    step.end()
    forget_step = partial(delattr, optimizer, "_ampcompile_step")
    call_without_interrupt([forget_step, *optimizers.exchange_class(optimizer, optimizers.torchs_class(optimizer))])
    optimizers.mark_amp_aware(optimizer, bool(optimizer.defaults.get("fused")))
