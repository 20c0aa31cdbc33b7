"""Which inputs are weights, and which of them have copies: kept, on trial, gathered, or none."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampcompile.passes.analysis.weights import find_copied_weights, find_gathered_weights, find_weights
from ampcompile.passes.graph import placeholders
from ampcompile.sharding.weight import ShardedWeight
from tests.compiling import Looking


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("shift", torch.randn(3))
        self.held = torch.randn(3)
        self.gaps = torch.randn(3, 2)[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.shift + self.held + self.gaps


def test_weights_are_parameters_buffers_and_tensors_that_modules_hold() -> None:
    model, x = Model(), torch.randn(3)

    def look(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> tuple[set[int], dict[int, bool]]:
        for node in placeholders(gm):
            node.meta["val"] = node.meta["example_value"]
        address = {node: value.data_ptr() for node, value in zip(placeholders(gm), inputs, strict=True)}
        copied = find_copied_weights(gm, inputs)
        return set(map(address.__getitem__, find_weights(gm, inputs))), {address[n]: copied[n] for n in copied}

    backend = Looking(look)
    torch.compile(model, backend=backend)(x)
    ((found, copied),) = backend.found
    weight, shift, held, gaps = (t.data_ptr() for t in (model.weight, model.shift, model.held, model.gaps))
    assert found == {weight, shift, held, gaps}
    assert copied == {weight: False, shift: False, held: True}, "on trial unless registered; not with gaps"


def test_a_weight_that_fsdp_gathers_has_a_copy_that_is_not_kept() -> None:
    sharded = nn.Parameter(torch.randn(3))
    sharded.__class__ = ShardedWeight

    def look(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[set[str]]:
        for node in placeholders(gm):
            node.meta["val"] = node.meta["example_value"]
        given = [sharded if isinstance(value, nn.Parameter) else value for value in inputs]
        return [{node.name for node in find(gm, given)} for find in (find_copied_weights, find_gathered_weights)]

    backend = Looking(look)
    torch.compile(Model(), backend=backend)(torch.randn(3))
    ((copied, gathered),) = backend.found
    (name,) = gathered
    assert "weight" in name and len(copied) == 2 and name not in copied
