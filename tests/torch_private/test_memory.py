"""Which tensors share memory, and which have theirs alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor

from ampcompile.torch_private import memory


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_tensor_owns_its_memory_alone_or_with_a_base_that_nobody_holds(mode: type) -> None:
    weight = nn.Parameter(torch.randn(3, 2))
    with mode():
        computed, base = weight * 2, weight * 2
        assert memory.owns_memory(computed)
        if mode is torch.no_grad:
            assert memory.owns_memory((weight * 2)[0]), "its base is in no variable"
        for view in (weight[0], weight.detach()[0], base[0], weight.detach()):
            assert not memory.owns_memory(view)
        saved = (weight * 2).exp()  # for its backward
        assert memory.owns_memory(saved)
    assert not memory.owns_memory(torch.eye(2).to_sparse())
    torch.vmap(lambda row: pytest.fail("it has no memory of its own") if memory.owns_memory(row * 2) else row)(weight)


def test_memory_is_shared_by_views_and_told_of_fake_tensors_too() -> None:
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(3)
    for x in (torch.randn(3), fake):
        assert memory.memory_of(x) == memory.memory_of(x[1:]) is not None
    assert memory.memory_of(torch.randn(3)) is not memory.memory_of(torch.eye(2).to_sparse()) is None
    assert memory.memory_of(3) is None


def test_memory_is_that_of_the_tensors_inside() -> None:
    a, b = torch.randn(3), torch.randn(3)
    of = memory.memory_of
    assert of(WrapperSubclass(a)) == of(a), "as a DTensor has that of its part"
    assert of(TwoTensor(a, b)) == of(TwoTensor(a[:2], b[:2])) != of(TwoTensor(b, a))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, lambda f: torch.func.vmap(torch.func.grad(f))])
def test_what_a_transform_wraps_keeps_its_memory(transform: Any) -> None:
    x = torch.randn(3, 2)
    known = []

    def f(value: Tensor) -> Tensor:
        known.append(memory.memory_of(value) == memory.memory_of(value.view(-1)) == x.untyped_storage()._cdata)
        return value.sum()

    transform(f)(x)
    assert known == [True]
