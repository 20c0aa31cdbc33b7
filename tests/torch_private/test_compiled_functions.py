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
from tests.compiling import Looking


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


def test_whose_each_result_is_and_what_is_written() -> None:
    """An input with a history comes back first; views leave as views of their base, which is returned besides."""

    def f(x: Tensor, y: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x.mul_(2)
        count.add_(1)
        base = y.sin()
        return y.cos(), base[1:], base[:2]

    (function,), _, _ = compile_and_call(f, leaf() * 1, leaf(), torch.zeros(()))
    *first, base = compiled_functions.result_slots(function)
    assert first == [None, ResultSlot(0, "output"), None, None] and base is not None and base.kind == "base"
    assert compiled_functions.written_arguments(function) == [0, 1]  # in the order of their use
    assert compiled_functions.writes_to_differentiated_inputs(function)


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


def test_compiled_autograd_hands_all_inputs_in_one_list() -> None:
    x, backend = leaf(), Looking(lambda gm, inputs: compiled_functions.is_backward(inputs))
    loss = torch.compile(torch.sin, backend="aot_eager")(x).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        loss.backward()
    torch.compile(torch.cos, backend=backend)(torch.randn(4))
    assert backend.found == [True, False]
