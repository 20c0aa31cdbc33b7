"""The fused SGD step equals torch's optimizer, and changes nothing when it is skipped."""

from copy import deepcopy

import pytest
import torch

from ampcompile.kernels.sgd import SgdGroup, sgd_, sgd_reference_
from tests.scaler.cases import GRAD_DTYPES, assert_close, assert_equal, sgd_tensors

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


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_several_groups_gradient_types_and_copies_equal_plain_torch(dtype):
    ours = sgd_tensors(GROUPS, dtype)
    reference, grads = deepcopy(ours), deepcopy(ours.grads)
    sgd_(ours, torch.tensor(0.3))
    sgd_reference_(reference, torch.tensor(0.3))
    assert_close(ours.params, reference.params)
    assert_close(ours.momentum_buffers, reference.momentum_buffers)
    assert_equal(ours.grads, grads)
    for param, copy in zip(ours.params, ours.copies, strict=True):
        assert copy is None or torch.equal(copy, param.to(copy.dtype))


@pytest.mark.parametrize("found_inf", [1.0, 2.0, -1.0, torch.nan])
def test_a_skipped_step_changes_nothing_but_stale_copies(found_inf):
    ours = sgd_tensors(GROUPS)
    ours.grads[3].fill_(torch.nan)
    before = deepcopy(ours)
    for step in (sgd_, sgd_reference_):
        step(ours, torch.tensor(torch.nan), torch.tensor(found_inf))
        assert_equal(ours.params, before.params)
        assert_equal(ours.momentum_buffers, before.momentum_buffers)
        for param, copy in zip(ours.params, ours.copies, strict=True):
            assert copy is None or torch.equal(copy, param.to(copy.dtype))
            if copy is not None:
                copy.fill_(torch.nan)
