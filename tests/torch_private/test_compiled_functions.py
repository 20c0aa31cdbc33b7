"""What AOTAutograd makes of a graph: its arguments, its results' gradients, and a backward that can be replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from ampcompile.torch_private import compiled_functions
from ampcompile.torch_private.compiled_functions import ResultSlot, functions_made, intercept


def compile_and_call(f: Callable[..., Any], *inputs: Tensor) -> tuple[list[Any], Any, Callable[..., Any]]:
    """The functions that AOTAutograd makes of `f`, its results, and the compiled callable."""
    compiled = torch.compile(f, backend="aot_eager")
    with functions_made() as made:
        result = compiled(*inputs)
    return made, result, compiled


def leaf() -> Tensor:
    return torch.randn(4, requires_grad=True)


def test_a_graph_with_gradients_is_one_function_and_one_without_none() -> None:
    assert len(compile_and_call(torch.sin, leaf())[0]) == 1
    assert not compile_and_call(torch.cos, torch.randn(4))[0]


def test_every_result_has_a_slot_and_every_slot_a_gradient() -> None:
    """Views of what the graph computes leave it as views of their base, which is returned besides."""

    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        base = x.sin()
        return x.cos(), base[1:], base[:2]

    (function,), _, compiled = compile_and_call(f, leaf())
    slots = compiled_functions.result_slots(function)
    assert slots[0] == ResultSlot(0, "output") and slots[1:3] == [None, None]
    assert [slot.kind for slot in slots[3:] if slot is not None] == ["base"] and len(slots) == 4

    received: list[int] = []

    def backward(original: Any, ctx: Any, gradients: Any) -> Any:
        received.append(len(gradients))
        return original(ctx, gradients)

    intercept(function, lambda ctx, arguments: None, backward)
    sum(result.sum() for result in compiled(leaf())).backward()
    assert received == [len(slots)]


def test_forward_is_preceded_and_backward_replaced() -> None:
    (function,), _, compiled = compile_and_call(torch.sin, leaf())
    seen: list[Any] = []

    def forward(ctx: Any, arguments: Any) -> None:
        ctx.remembered = "ours"
        seen.extend(arguments)

    def backward(original: Any, ctx: Any, gradients: Any) -> Any:
        assert ctx.remembered == "ours"
        return tuple(2 * gradient for gradient in original(ctx, gradients))

    intercept(function, forward, backward)
    x = leaf()
    compiled(x).sum().backward()
    assert any(argument is x for argument in seen)
    assert torch.equal(x.grad, 2 * x.detach().cos())


def test_arguments_that_are_written_are_told() -> None:
    def f(x: Tensor, count: Tensor) -> Tensor:
        result = x.sin()
        count.add_(1)
        return result

    (function,), _, _ = compile_and_call(f, leaf(), torch.zeros(()))
    assert compiled_functions.written_arguments(function) == [1]
    assert not compiled_functions.writes_to_differentiated_inputs(function)


def test_inputs_with_a_history_that_are_written_come_back_as_results() -> None:
    def f(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sin()

    (function,), _, _ = compile_and_call(f, leaf() * 1)
    assert compiled_functions.writes_to_differentiated_inputs(function)
    assert compiled_functions.result_slots(function)[0] is None


def test_subclasses_are_taken_apart() -> None:
    two = TwoTensor(torch.randn(4), torch.randn(4)).requires_grad_()
    for x, expected in ((two, True), (leaf(), False)):
        (function,), _, _ = compile_and_call(lambda x: x.sin(), x)
        assert compiled_functions.takes_apart_subclasses(function) == expected
    a, b = torch.randn(4), torch.randn(4)
    assert [id(part) for part in compiled_functions.parts_of(TwoTensor(a, TwoTensor(b, a)))] == [*map(id, (a, b, a))]
    assert compiled_functions.parts_of(a)[0] is a and compiled_functions.parts_of(3) == [3]


@pytest.mark.parametrize("survives", [True, False])
def test_a_later_backward_may_keep_its_graph(survives: bool) -> None:
    """Not by itself: the second half says that torch still raises, and that the change is still needed."""

    def f(x: Tensor) -> Tensor:
        return x.sin().exp().sin()

    (function,), first, compiled = compile_and_call(f, leaf())
    first.sum().backward()  # compiled for a graph that isn't kept
    assert function.metadata.bw_donated_idxs, "otherwise nothing is overwritten"
    if survives:
        compiled_functions.survive_kept_graphs(function)
    x = leaf()
    loss = compiled(x).sum()
    if not survives:
        with pytest.raises(RuntimeError, match="donated"):
            loss.backward(retain_graph=True)
        return
    (once,), (twice,) = (torch.autograd.grad(loss, x, retain_graph=keep) for keep in (True, False))
    assert torch.equal(once, twice)
    (expected,) = torch.autograd.grad(f(x).sum(), x)
    assert torch.allclose(once, expected)


@pytest.mark.parametrize("keep", [True, False])
def test_a_backward_knows_whether_its_graph_is_kept(keep: bool) -> None:
    told: list[bool] = []
    x = leaf()
    y = x.sin()
    y.register_hook(lambda gradient: told.append(compiled_functions.graph_is_kept()))
    y.sum().backward(retain_graph=keep)
    assert told == [keep]


def test_compiled_autograd_hands_all_inputs_in_one_list() -> None:
    told: list[bool] = []

    def backend(gm: Any, inputs: Any) -> Any:
        told.append(compiled_functions.is_backward(inputs))
        return gm.forward

    x = leaf()
    loss = torch.compile(torch.sin, backend="aot_eager")(x).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        loss.backward()
    torch.compile(torch.cos, backend=backend)(torch.randn(4))
    assert told == [True, False]
