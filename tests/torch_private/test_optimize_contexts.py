"""Every callable that torch.compile returns passes through one call, with its backend, `dynamic` and `fullgraph`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompile.torch_private import dynamo_caches, optimize_contexts, patches
from tests.compiling import Looking

PLACE = "OptimizeContext.__call__"


def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    return gm.forward


@pytest.fixture
def wrapped() -> Iterator[list[tuple[Any, Any]]]:
    """What is wrapped meanwhile, with its backend; it runs as before."""
    seen: list[tuple[Any, Any]] = []

    def wrap(backend: Any, fn: Any, compiled: Any) -> Any:
        seen.append((getattr(backend, "compiler_fn", backend), fn))
        return functools.wraps(compiled)(lambda *args: compiled(*args))

    with patches.replaced(PLACE, optimize_contexts.wrap_call(wrap, lambda backend, dynamic, full: (dynamic, full))):
        yield seen


def test_functions_are_wrapped_with_their_backend(wrapped: list[tuple[Any, Any]]) -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin()

    compiled = torch.compile(f, backend=backend, mode=None)
    assert wrapped == [(backend, f)]
    x = torch.randn(3)
    assert torch.equal(compiled(x), x.sin())
    told = dynamo_caches.how_compiled(compiled)
    assert told is not None and told.original is f


def test_a_module_s_call_is_wrapped_and_it_is_not(wrapped: list[tuple[Any, Any]]) -> None:
    model = nn.Linear(3, 2)
    compiled = torch.compile(model, backend=backend)
    assert isinstance(compiled, torch._dynamo.OptimizedModule)
    assert [fn for _, fn in wrapped if isinstance(fn, nn.Module)] == [] and len(wrapped) == 1
    x = torch.randn(4, 3)
    assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize(("dynamic", "symbols"), [(True, 1), (False, 0)])
def test_dynamic_and_fullgraph_can_be_asked_for_instead(dynamic: bool, symbols: int) -> None:
    seeing = Looking(lambda gm, inputs: sum(isinstance(value, torch.SymInt) for value in inputs))

    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.sin()

    asked = optimize_contexts.wrap_call(lambda backend, fn, compiled: compiled, lambda *_: (dynamic, True))
    with patches.replaced(PLACE, asked):
        smooth, broken = (torch.compile(f, backend=seeing) for f in (lambda x: x.sin(), breaks))
    smooth(torch.ones(5))
    assert seeing.found == [symbols]
    with pytest.raises(torch._dynamo.exc.Unsupported):
        broken(torch.ones(5))


def test_other_settings_survive_the_change() -> None:
    guarded: list[Any] = []

    def keep_all(entries: Any) -> list[bool]:
        guarded.extend(entries)
        return [True] * len(entries)

    asked = optimize_contexts.wrap_call(lambda backend, fn, compiled: compiled, lambda *_: (False, False))
    with patches.replaced(PLACE, asked):
        compiled = torch.compile(lambda x: x.sin(), backend=backend, options={"guard_filter_fn": keep_all})
    compiled(torch.ones(5))
    assert guarded


def test_a_function_that_is_passed_over_runs_as_it_is() -> None:
    compiling: list[bool] = []

    def noted(x: Tensor) -> Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x.sin()

    optimize_contexts.pass_over(noted)
    torch.compile(noted, backend=backend)(torch.ones(2))
    assert compiling == [False]


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

    optimize_contexts.pass_over(outer)
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
