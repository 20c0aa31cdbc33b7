"""torch's operator database: names of operators, and calls drawn of their samples."""

import itertools
import random
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from proof.ops.calls import Call

DRAWN = 2
"""Samples of each operator in the default sample."""
UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
UNWRITTEN |= {"resize_as_"}
"""Operators that hand out memory as they find it."""


@cache
def list_operators() -> dict[str, Any]:
    """Every entry, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.opinfo import core
    # For each sample it looks for a unittest among all frames, which takes longer than the sample where they are many.
    core.extract_test_fn = common_utils.extract_test_fn = lambda: None
    return {info.full_name: info for info in op_db}


def draw_calls(name: str, rest: bool = False) -> Iterator[tuple[int, Call]]:
    """The calls of an operator's default sample with their places among all of them; or the `rest`."""
    calls = make_calls(name)
    chosen = random.Random(name).sample(range(len(calls)), min(DRAWN, len(calls)))
    for place in sorted(set(range(len(calls))) - set(chosen) if rest else chosen):
        yield place, calls[place]


def make_calls(name: str, at_most: int | None = None) -> list[Call]:
    """The calls of an operator, in float32 where it takes that, always with the same numbers; none if torch can't
    make any on this device.
    """
    info = list_operators()[name]
    dtype = torch.float32 if torch.float32 in info.dtypes else next(iter(sorted(info.dtypes, key=str)), torch.float32)
    differentiable = info.supports_autograd and dtype.is_floating_point
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # of operators that are going, or new
        torch.manual_seed(0)
        random.seed(0)
        try:
            made = info.sample_inputs("cpu", dtype, requires_grad=differentiable)
            found = list(itertools.islice(made, at_most))
        except (AttributeError, TypeError, RuntimeError):  # those that only a GPU has
            return []
    return [Call(info.op, (x.input, *x.args), x.kwargs, x.output_process_fn_grad) for x in found]
