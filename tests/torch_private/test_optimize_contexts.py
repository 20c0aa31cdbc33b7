"""What torch.compile was given survives a change, and what Dynamo looks at and steps over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompile.torch_private import dynamo_marks, optimize_contexts, patches
from tests.compiling import Looking


def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    return gm.forward


def test_other_settings_survive_the_change() -> None:
    guarded: list[Any] = []

    def keep_all(entries: Any) -> list[bool]:
        guarded.extend(entries)
        return [True] * len(entries)

    asked = optimize_contexts.wrap_call(lambda backend, fn, compiled: compiled, lambda *_: (False, False))
    with patches.replaced("OptimizeContext.__call__", asked):
        compiled = torch.compile(lambda x: x.sin(), backend=backend, options={"guard_filter_fn": keep_all})
    compiled(torch.ones(5))
    assert guarded


def test_dynamo_looks_at_no_frame_while_its_callback_is_unset() -> None:
    counting = Looking()

    def inner(x: Tensor) -> Tensor:
        return x.sin()

    def outer(x: Tensor) -> Tensor:
        before = optimize_contexts.set_frame_callback(None)
        try:
            return inner(x)
        finally:
            assert optimize_contexts.set_frame_callback(before) is None

    dynamo_marks.pass_over(outer)
    torch.compile(outer, backend=counting)(torch.ones(2))
    assert not counting.found


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("make", [Own, lambda: nn.Linear(2, 2), lambda: nn.Sequential(nn.Linear(2, 2))])
def test_what_torch_steps_over_when_it_is_compiled_in_place(make: Callable[[], nn.Module]) -> None:
    """A module that isn't compiled, although the user asked for it, is known."""
    found, module = Looking(), make()
    module.compile(backend=found)
    module(torch.ones(1, 2))
    assert optimize_contexts.compiles_nothing(module._call_impl) == (not found.found)
    assert not optimize_contexts.compiles_nothing(module.forward)
    assert not optimize_contexts.compiles_nothing(torch.compile(module, backend=backend).forward)
