"""`make_fx` above autocast keeps regions and composite ops, and every value has a node of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from ampcompile.torch_private import tracing


def test_a_user_s_hooks_see_nothing_of_what_is_computed_on_fakes() -> None:
    seen: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda saved: saved):
        with tracing.computing_on(FakeTensorMode()):
            torch.ones(3, requires_grad=True).sin()
        assert not seen
        torch.ones(3, requires_grad=True).sin()
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("constant", "largest"),
    [
        (torch.tensor([1.0, -3.0, float("inf"), float("nan")]), 3.0),
        (torch.tensor([3 + 4j]), 5.0),
        (torch.tensor([], dtype=torch.bfloat16), 0.0),
        (torch.tensor([float("nan")]), 0.0),
        (torch.tensor([-7]), 7.0),
        (torch.tensor([True, False]), 1.0),
        (torch.tensor([[1, 2], [3, 4]], dtype=torch.uint16), 4.0),
        (torch.tensor([1.0, 4.0]).to(torch.float8_e4m3fn), 4.0),
        (torch.eye(2).to_sparse(), 0.0),  # not looked at
    ],
)
def test_the_largest_finite_magnitude_is_found_among_fakes_too(constant: Tensor, largest: float) -> None:
    """The range guards ask for it."""
    assert tracing.largest_magnitude(constant) == largest
    with FakeTensorMode():
        assert tracing.largest_magnitude(constant) == largest
