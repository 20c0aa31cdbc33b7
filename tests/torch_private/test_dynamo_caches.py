"""How a callable was compiled can be told, and Dynamo forgets what was compiled to be looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompile.torch_private import dynamo_caches
from tests.compiling import Looking


def sin(x: Tensor) -> Tensor:
    return x.sin()


class Compiled(nn.Linear):
    def __init__(self, backend: Any) -> None:
        super().__init__(2, 2)
        self.compile(backend=backend, dynamic=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda backend: (sin, torch.compile(sin, backend=backend, dynamic=False)),
        lambda backend: (model := nn.Linear(2, 2), torch.compile(model, backend=backend, dynamic=False)),
        lambda backend: (model := Compiled(backend), model),
    ],
    ids=["function", "module", "module.compile"],
)
def test_what_torch_compile_was_given_is_told(make: Callable[[Any], tuple[Any, Any]]) -> None:
    backend = Looking()
    original, compiled = make(backend)
    told = dynamo_caches.how_compiled(compiled)
    assert told is not None and told.original is original and told.dynamic is False
    assert dynamo_caches._innermost(told.backend) is backend
    assert [dynamo_caches.how_compiled(f) for f in (sin, nn.ReLU(), 3)] == [None] * 3


@pytest.mark.parametrize("fails", [False, True])
def test_dynamo_forgets_one_backend_and_keeps_the_others(fails: bool) -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin()

    kept, dropped = Looking(), Looking()
    others, looked_at = (torch.compile(f, backend=backend) for backend in (kept, dropped))
    others(torch.ones(2))
    for _ in range(2):
        try:
            with dynamo_caches.dynamo_as_it_was(dropped):
                looked_at(torch.ones(2))
                looked_at(torch.ones(2))
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
    assert len(dropped.found) == 2, "compiled anew, once each time"
    others(torch.ones(2))
    assert len(kept.found) == 1


def test_sizes_that_were_seen_meanwhile_are_not_learnt() -> None:
    """Else the next call with a third size would be compiled for all of them."""

    def f(x: Tensor) -> Tensor:
        return x.sin()

    looked_at = Looking()
    backend = Looking(lambda gm, inputs: [value.shape[0] for value in inputs if isinstance(value, Tensor)])
    with dynamo_caches.dynamo_as_it_was(looked_at):
        for size in (2, 3):
            torch.compile(f, backend=looked_at)(torch.ones(size))
    torch.compile(f, backend=backend)(torch.ones(4))
    ((size,),) = backend.found
    assert size == 4 and type(size) is int
