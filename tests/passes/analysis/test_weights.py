"""Which inputs are weights, and which of them have copies: on trial, or not at all."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampcompile.passes.analysis.weights import find_copied_weights, find_weights
from ampcompile.passes.graph import placeholders
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
