"""The fused SGD step equals torch's optimizer, and changes nothing when it is skipped."""

import pytest
import torch

from ampcompile.kernels.sgd import SgdGroup, sgd_
from tests.scaler.cases import assert_close, sgd_tensors

GROUPS = [
    SgdGroup(0.1, 0.0, 0.0, False, 0.0, False),
    SgdGroup(0.1, 0.0, 0.0, False, 0.1, True),
    SgdGroup(0.1, 0.9, 0.0, False, 0.1, False),
    SgdGroup(0.1, 0.9, 0.0, True, 0.0, False),
    SgdGroup(0.1, 0.9, 0.0, True, 0.1, True),
    SgdGroup(0.1, 0.9, 0.5, False, 0.1, True),
]


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_five_steps_equal_torchs_optimizer(group):
    ours = sgd_tensors([group])
    params = [torch.nn.Parameter(p.clone(memory_format=torch.preserve_format)) for p in ours.params]
    optimizer = torch.optim.SGD(
        params,
        group.lr,
        group.momentum,
        group.dampening,
        group.weight_decay,
        group.nesterov,
        maximize=group.maximize,
        foreach=False,
    )
    if group.dampening:  # torch's first step isn't dampened: start from its second
        for param, buffer in zip(params, ours.momentum_buffers, strict=True):
            optimizer.state[param]["momentum_buffer"] = buffer.clone(memory_format=torch.preserve_format)
    elif group.momentum:
        for buffer in ours.momentum_buffers:
            buffer.zero_()
    for _ in range(5):
        for param, grad in zip(params, ours.grads, strict=True):
            grad.normal_()
            param.grad = grad * 0.25
        optimizer.step()
        sgd_(ours, multiplier=torch.tensor(0.25), found_inf=torch.zeros(()))
        assert_close(ours.params, params)
        assert_close(ours.momentum_buffers, [optimizer.state[p].get("momentum_buffer") for p in params])
