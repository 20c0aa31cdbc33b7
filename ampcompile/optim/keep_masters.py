"""`keep_masters`: steps on 16-bit parameters with float32 precision, and coded states, for torch's optimizers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ampcompile.errors import OptimizerError
from ampcompile.torch_private import marks, optimizers

from . import adopt, give_back
from .checkpoints import drop_own_settings
from .fused_step import FusedStep, step_of
from .masters import checked, require_possible
from .states import chosen_states


@marks.run_untraced
def keep_masters(
    optimizer: torch.optim.Optimizer,
    how: str | None = "remainder",
    *,
    states: str | Mapping[str, str] = "float32",
    names: torch.nn.Module | None = None,
    seed: int = 0,
) -> KeptMasters:
    """Make the steps of an optimizer of 16-bit parameters as precise as with float32 parameters.

    `optimizer`: torch's SGD, Adam or AdamW, whose class becomes that of `ampcompile.optim`. `how`, for each parameter
    of 16 bits (docs/optimizer.md compares them):

    - `"remainder"`: int16 beside each bfloat16, which together are a float32 master weight.
    - `"remainder8"`: int8 beside each bfloat16, 24 bits together, below which a step is rounded at random, by `seed`.
    - `"float32"`: a master beside each bfloat16 or float16.
    - `"stochastic"`: nothing beside bfloat16, which is rounded up or down at random, by `seed`, parameter and step.
    - None: no masters, for float32 parameters whose `states` are coded.

    `states`, `names`: those of `ampcompile.optim.AdamW`. All of it is in `optimizer.state`. The returned object's
    `remove()` gives the optimizer back torch's class. Two optimizers of one parameter have one master, kept in one way.
    `seed`: 64 bits, signed. Raises OptimizerError for other optimizers, parameters and seeds.

    >>> model = model.to(torch.bfloat16)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> masters = ampcompile.keep_masters(optimizer)
    >>> model(x.bfloat16()).square().mean().backward()
    >>> optimizer.step()
    """
    kind, step = type(optimizer), step_of(optimizer)
    exchanged = step is not None and step.exchanged and step.optimizer() is optimizer
    if kind not in optimizers.TORCHS and not exchanged:
        raise OptimizerError(
            f"found an optimizer of type {kind.__name__}; expected torch's SGD, Adam or AdamW, whose steps are known: "
            "keep float32 parameters for others; those of ampcompile.optim take masters= when they are made"
        )
    if (foreign := optimizers.replaced_step(optimizer)) is not None:
        raise OptimizerError(
            f"found a step of {kind.__name__} that was replaced by {getattr(foreign, '__qualname__', foreign)}, "
            "expected torch's, which becomes one that knows the masters: call keep_masters() first, then what wraps "
            "the step, such as Accelerate's prepare()"
        )
    if how is not None:
        require_possible(optimizer, how)
    elif states == "float32":
        raise OptimizerError("found how=None with float32 states; expected masters or states='8bit'")
    chosen, seed = chosen_states(optimizer, states, how, names), checked(seed)
    own = {"masters": how, "states": states, "seed": seed}
    drop_own_settings(optimizer.param_groups, own)
    step = adopt(optimizer) or step_of(optimizer)
    assert step is not None
    if how is not None:
        step.keep_masters(how, seed)
        optimizers.mark_amp_aware(optimizer)
    if states != "float32":
        step.code_states(states, seed, chosen)
    optimizer.defaults.update(own)
    return KeptMasters(step)


class KeptMasters:
    """The masters that an optimizer of torch's keeps, and its coded states."""

    def __init__(self, step: FusedStep) -> None:
        self._step = step

    @marks.run_untraced
    def remove(self) -> None:
        """Give the optimizer back torch's class, with state of the parameters' types. OptimizerError if it has it.

        Coded states are decoded, one parameter after the other: a moment then takes as many bytes as its parameter.
        """
        if self._step.plain:
            raise OptimizerError(
                "found masters that were removed, expected those that an optimizer keeps: call keep_masters() again"
            )
        give_back(self._step)
