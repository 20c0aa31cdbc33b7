"""A copy has its weight's layout, and only what can be watched has one."""

import torch
from torch import Tensor, nn

from ampcompile.weights.spec import hoistable


def test_what_is_not_hoistable() -> None:
    with torch.inference_mode():
        inference = torch.randn(3)
    for tensor in (
        torch.randn(1, 3).expand(4, 3),
        torch.randn(4, 6)[:, ::2],
        torch.eye(3).to_sparse(),
        torch.ones(3, dtype=torch.int64),
        torch.randn(3).as_subclass(type("Sub", (Tensor,), {})),
        torch.empty(3, device="meta"),
        inference,
        3.0,
        None,
    ):
        assert not hoistable(tensor)
    assert hoistable(nn.Parameter(torch.randn(3)))
