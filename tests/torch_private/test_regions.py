"""The calls that bound regions in a traced graph are those that torch's own contexts make."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from ampcompile.torch_private import regions
from tests.compiling import Looking


@pytest.mark.parametrize(
    ("region", "begins", "ends"),
    [
        (lambda: torch.autocast("cpu"), regions.ENTER_AUTOCAST, regions.EXIT_AUTOCAST),
        (torch.no_grad, regions.SET_GRAD_ENABLED, regions.SET_GRAD_ENABLED),
        (torch.inference_mode, regions.ENTER_INFERENCE, regions.EXIT_INFERENCE),
    ],
)
def test_dynamo_records_where_a_region_begins_and_ends(
    region: Callable[[], AbstractContextManager[object]], begins: object, ends: object
) -> None:
    backend = Looking(lambda gm, _: [node.target for node in gm.graph.nodes if node.op == "call_function"])

    def f(x: Tensor) -> Tensor:
        with region():
            y = x.sin()
        return y.cos()

    torch.compile(f, backend=backend, fullgraph=True)(torch.randn(3))
    assert backend.found == [[begins, ends]]
