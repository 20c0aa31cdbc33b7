"""Gradients of bfloat16: momentum is of the type that torch keeps it in."""

import pytest
import torch
from torch import nn

from tests.pairs import pairs
from tests.scaler.cases import assert_close, scaled

SCALE = 2.0**10
MODES = [False, True] if torch.__version__ >= "2.12" else [False]  # foreach, where torch's own step takes them
NAMES = ("momentum", "weight_decay", "nesterov", "maximize", "foreach")
CASES = pairs(
    (0.0, 0.9), (0.0, 0.1), (False, True), (False, True), MODES, allowed=lambda m, d, nesterov, *_: m or not nesterov
)


def trained(case, ours):
    """Five steps, of which the optimizer itself takes two."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(25, 40).t())
    param.grad_dtype = torch.bfloat16
    optimizer, scaler = torch.optim.SGD([param], 0.1, **dict(zip(NAMES, case, strict=True))), scaled(init_scale=SCALE)
    for step in range(5):
        by_scaler = ours and step not in (1, 2)
        param.grad = (torch.randn_like(param) * (SCALE if by_scaler else 1.0)).to(torch.bfloat16).detach()
        scaler.step(optimizer) if by_scaler else optimizer.step()
        scaler.update(SCALE)
    return [param.detach(), *optimizer.state_dict()["state"].get(0, {}).values()]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sgd_on_bfloat16_gradients_keeps_momentum_as_torch_does(case):
    """In the gradients' type, unless weight decay makes them float32."""
    mine, theirs = trained(case, True), trained(case, False)
    for a, b in zip(mine, theirs, strict=True):
        assert a is b or (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    assert_close(mine[:1], theirs[:1])


def test_momentum_of_another_type_that_was_loaded_stays():
    param = nn.Parameter(torch.ones(3))
    param.grad_dtype = torch.bfloat16
    optimizer = torch.optim.SGD([param], 0.1, momentum=0.9)
    optimizer.state[param]["momentum_buffer"] = torch.ones(3)
    param.grad = torch.ones(3, dtype=torch.bfloat16)
    scaled(init_scale=1.0).step(optimizer)
    assert_close([optimizer.state[param]["momentum_buffer"]], [torch.full((3,), 1.9)])
