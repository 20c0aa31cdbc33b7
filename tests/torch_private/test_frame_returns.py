"""What a frame computes and returns is known before its graph is compiled, and what shares memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor

from ampcompile.torch_private import frame_returns, patches


def computed(f: Any, *args: Any) -> tuple[int, bool]:
    """How many float32 tensors the frame of a call computes and returns, and whether it returns no others."""
    told: list[tuple[int, bool]] = []

    def act(frame: Any) -> None:
        tensors, all_of_them = frame_returns.computed_and_returned(frame, torch.float32)
        told.append((len(tensors), all_of_them))

    with patches.replaced("OutputGraph.compile_subgraph", frame_returns.watch_returns(act)):
        torch.compile(f, backend="eager")(*args)
    (only,) = told
    return only


@dataclasses.dataclass
class Output:
    loss: Tensor
    logits: Any = None


kept: list[Tensor] = []


def keeps_a_result(x: Tensor) -> Tensor:
    y = x.sin()
    kept.append(y)
    return y


def hands_on_what_another_object_holds(x: Tensor) -> Tensor:
    output = Output(x.sin())
    return output.loss


def shares_memory(x: Tensor) -> Any:
    y = x.sin()
    return y, [y[1:]], x.cos()


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x: x.sin(), (1, True)),
        (lambda x: (x.sin(), [x.cos(), {"a": x.tan()}]), (3, True)),
        (lambda x: Output(x.sin(), logits=(x.cos(), x.tan())), (3, True)),
        (lambda x: (x.sin(), x.double().sin(), 3), (1, True)),
        (lambda x: (x.sin(), x), (1, True)),
        (lambda x: x[1:], (0, True)),
        (hands_on_what_another_object_holds, (1, True)),
        (keeps_a_result, (0, False)),
        (shares_memory, (1, False)),
        (lambda x: (x.sin(), {x.cos()}), (1, False)),
    ],
)
def test_what_a_frame_computes_is_told_from_what_was_there_and_what_stays(f: Any, expected: tuple[int, bool]) -> None:
    assert computed(f, torch.randn(3)) == expected


def test_memory_is_shared_by_views_and_told_of_fake_tensors_too() -> None:
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(3)
    for x in (torch.randn(3), fake):
        assert frame_returns.memory_of(x) == frame_returns.memory_of(x[1:]) is not None
    assert frame_returns.memory_of(torch.randn(3)) is not frame_returns.memory_of(torch.eye(2).to_sparse()) is None
    assert frame_returns.memory_of(3) is None


def test_memory_is_that_of_the_tensors_inside() -> None:
    a, b = torch.randn(3), torch.randn(3)
    memory = frame_returns.memory_of
    assert memory(WrapperSubclass(a)) == memory(a), "as a DTensor has that of its part"
    assert memory(TwoTensor(a, b)) == memory(TwoTensor(a[:2], b[:2])) != memory(TwoTensor(b, a))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, lambda f: torch.func.vmap(torch.func.grad(f))])
def test_what_a_transform_wraps_keeps_its_memory(transform: Any) -> None:
    x = torch.randn(3, 2)
    known = []

    def f(value: Tensor) -> Tensor:
        known.append(
            frame_returns.memory_of(value) == frame_returns.memory_of(value.view(-1)) == x.untyped_storage()._cdata
        )
        return value.sum()

    transform(f)(x)
    assert known == [True]
