"""A clipping of one iteration that waits for the step: a factor by which it multiplies the gradients.

The step applies it, or it is dropped with the gradients, or ClipError is raised: other gradients never get it.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ampcompile.kernels.planned import Marks
from ampcompile.torch_private import optimizers

from .plan import on_device

NOT_FINITE = (
    "The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped. To disable "
    "this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
)
"""torch's words"""


@dataclass(eq=False)
class Pending:
    """A clipping that waits."""

    factor: Tensor
    marks: Marks
    """Of the gradients that were clipped"""
    unscales: bool
    """The factor unscales them, too; else they were taken for unscaled ones"""
    over: bool = False
    """The iteration has ended: changed gradients, which are the next one's, drop the clipping then. Before, they are an
    error: the clipping would apply to other gradients than those that it was computed for"""


def multiply(grads: Sequence[Tensor], multiplier: Tensor, then: Iterable[Callable[[], object]]) -> None:
    """Multiply gradients in place, and call C functions, without an interrupt between."""
    # After Ctrl-C between the two the factor would still wait, and the next step multiply the gradients once more.
    values = [grad._values() if grad.is_sparse else grad for grad in grads]
    calls: list[Callable[[], object]] = [
        partial(optimizers.multiply_, [each for each in values if each.device == device], on_device(device, multiplier))
        for device in dict.fromkeys(value.device for value in values)
    ]
    with torch.no_grad():
        call_without_interrupt([*calls, *then])


def call_without_interrupt(calls: Iterable[Callable[[], object]]) -> None:
    """Call C functions in turn. No signal handler runs in between: Python runs them between bytecodes only."""
    # `deque` walks the `map` in C; a loop of Python's has bytecodes between the calls.
    deque(map(operator.call, calls), maxlen=0)


def clip_values(params: list[Tensor], clip_value: float, foreach: bool | None) -> None:
    """Clip each element of the gradients by torch's function; on a CPU in one pass, where its default takes two."""
    one_pass = foreach is None and all(param.is_cpu for param in params)
    nn.utils.clip_grad_value_(params, clip_value, False if one_pass else foreach)
