"""Results of one memory are cast once, and are views of what that gives, of the same shapes and strides."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ampcompile.compiler.shared_memory import cast_together
from tests.compiling import LOW, same_bits

VIEWS: list[Callable[[Tensor], list[Tensor]]] = [
    lambda y: [y, y[0]],
    lambda y: [y[1], y[1:3]],
    lambda y: [y[:, ::2], y.t()[1:], y],
    lambda y: [y.expand(3, 4, 6), y[2:]],
    lambda y: [y[2:2], y[3], y[3, 2:]],
    lambda y: [y.view(2, 12)[:, 4:], y.unfold(1, 3, 1)],
    lambda y: [y[0], y.as_strided((5,), (3,), 4)],
]


def cast(tensors: list[Tensor]) -> tuple[list[Tensor], int]:
    """What becomes of them, and the number of casts."""
    casts: list[Tensor] = []
    return cast_together(tensors, lambda t: casts.append(t) or t.float()), len(casts)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("views", VIEWS)
def test_one_cast_gives_all_their_numbers_and_memory(views: Callable[[Tensor], list[Tensor]], grad: bool) -> None:
    y = torch.randn(4, 6).to(LOW).requires_grad_(grad) * 1
    low = views(y)
    wide, casts = cast(low)
    assert casts == 1 and same_bits(wide, [t.float() for t in low])
    assert [t.stride() for t in wide] == [t.stride() for t in low]
    assert len({t.untyped_storage()._cdata for t in wide}) == 1
    assert [t.requires_grad for t in wide] == [grad] * len(low)
    if grad:
        gradients = [torch.autograd.grad(sum(((i + 1) * t).sum() for i, t in enumerate(ts)), y) for ts in (wide, low)]
        assert same_bits(*gradients), "no sum of these is rounded"
    with torch.no_grad():
        low[-1].zero_(), wide[-1].zero_()
    assert same_bits(wide, [t.float() for t in low])


def test_memory_that_only_some_of_the_base_is_needed_of_is_cast_where_it_is() -> None:
    y = torch.randn(100, 6).to(LOW)
    seen: list[Tensor] = []
    first, second = cast_together([y[10], y[11:13]], lambda t: seen.append(t) or t.float())
    assert [t.numel() for t in seen] == [18] and same_bits([first, second], [y[10].float(), y[11:13].float()])


def test_each_by_itself_where_gradients_part() -> None:
    leaf = torch.randn(4, 6).to(LOW).requires_grad_()
    y = leaf * 1
    (first, second), casts = cast([y, y.detach().requires_grad_()])
    assert casts == 2 and first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_a_view_with_a_gradient_of_its_own_keeps_it() -> None:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return -gradient

    x = torch.randn(4, 6, requires_grad=True)
    y = x.to(LOW)
    wide, casts = cast([y, Reverse.apply(y), Reverse.apply(y)[1:]])
    assert casts == 3 and torch.equal(*torch.autograd.grad(wide[0].sum() + 2 * wide[1].sum(), x), -torch.ones(4, 6))


def test_one_without_gradient_shares_with_one_that_has() -> None:
    y = torch.randn(4, 6).to(LOW).requires_grad_() * 1
    (detached, wide), casts = cast([y.detach(), y])
    assert casts == 1 and wide.requires_grad and not detached.requires_grad
    assert detached.data_ptr() == wide.data_ptr()


def test_subclasses_of_tensors_are_cast_by_themselves() -> None:
    class Named(torch.Tensor):
        """What may not know strides."""

    y = torch.randn(4, 6).to(LOW).as_subclass(Named)
    assert cast([y, y[0]])[1] == 2
