"""Dynamo traces weights of a subclass as plain parameters, tells them from these, and tells of other backends."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampcompile.torch_private import patches
from ampcompile.torch_private.dynamo_modules import see_as_parameters
from ampcompile.torch_private.patches import SHARDED_WEIGHTS
from tests.compiling import Looking, compiled


class Subclass(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.fixture
def found():  # type: ignore[no-untyped-def]
    tensors: list[torch.Tensor] = []
    patches.uninstall(SHARDED_WEIGHTS)
    see_as_parameters(Subclass, tensors.append)
    yield tensors
    patches.uninstall(SHARDED_WEIGHTS)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def swap(self, kind: type) -> None:
        """As FSDP does: the dictionary of parameters changes."""
        weight = self.layer._parameters.pop("weight")
        weight.__class__ = kind
        self.layer._parameters["weight"] = weight


def test_graphs_are_those_of_plain_parameters_and_apart_from_them(found: list[torch.Tensor]) -> None:
    model, x = Model(), torch.randn(3, 4)
    f, recorder = compiled(model)
    expected = f(x)
    for kind in (Subclass, nn.Parameter, Subclass):
        model.swap(kind)
        assert torch.equal(f(x), expected)
    first, second = ([str(node.target) for node in each.original.graph.nodes] for each in recorder.graphs)
    assert first == second and not found


def test_another_backend_is_told_of_for_each_weight(found: list[torch.Tensor]) -> None:
    models, backend = [Model(), Model()], Looking()
    for model in models:
        model.swap(Subclass)
        torch.compile(model, backend=backend)(torch.randn(3, 4))
    assert [id(weight) for weight in found] == [id(model.layer.weight) for model in models]
