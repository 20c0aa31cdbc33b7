"""The fused Adam step equals torch's optimizers, and changes nothing when it is skipped."""

from copy import deepcopy
from itertools import product

import pytest
import torch

from ampcompile.kernels.adam import AdamGroup, adam_, adam_reference_
from tests.scaler.cases import adam_tensors, assert_close, assert_equal

GROUPS = [
    AdamGroup(0.01, 0.9, 0.99, 1e-3, weight_decay, decoupled, maximize)
    for weight_decay, decoupled, maximize in product((0.0, 0.1), (False, True), (False, True))
]
GROUPS += [
    AdamGroup(0.01, beta1, beta2, 1e-3, 0.1, True, False) for beta1, beta2 in ((0.0, 0.0), (0.3, 0.5), (0.5, 0.0))
]


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_five_steps_equal_torchs_optimizer(group, amsgrad):
    ours = adam_tensors([group], amsgrad=amsgrad)
    ours.max_exp_avg_sqs = [torch.zeros_like(p) if amsgrad else None for p in ours.params]
    for state in (ours.exp_avgs, ours.exp_avg_sqs, ours.steps):
        for tensor in state:
            tensor.zero_()
    params = [torch.nn.Parameter(p.clone(memory_format=torch.preserve_format)) for p in ours.params]
    optimizer = (torch.optim.AdamW if group.decoupled_weight_decay else torch.optim.Adam)(
        params,
        group.lr,
        (group.beta1, group.beta2),
        group.eps,
        group.weight_decay,
        amsgrad,
        maximize=group.maximize,
        foreach=False,
    )
    for _ in range(5):
        for param, grad in zip(params, ours.grads, strict=True):
            grad.normal_()
            param.grad = grad * 0.25
        optimizer.step()
        adam_(ours, multiplier=torch.tensor(0.25), found_inf=torch.zeros(()))
        states = [optimizer.state[param] for param in params]
        assert_close(ours.params, params)
        assert_close(ours.exp_avgs, [s["exp_avg"] for s in states])
        assert_close(ours.exp_avg_sqs, [s["exp_avg_sq"] for s in states])
        assert_close(ours.max_exp_avg_sqs, [s.get("max_exp_avg_sq") for s in states])
        assert_equal(ours.steps, [s["step"] for s in states])


@pytest.mark.parametrize("step", [adam_, adam_reference_])
def test_without_memory_the_mean_is_the_gradient_itself(step):
    """torch's lerp is exact where it ends: means that were large leave nothing behind."""
    ours = adam_tensors([AdamGroup(0.01, 0.0, 0.0, 1e-3, 0.0, True, False)])
    for mean in ours.exp_avgs:
        mean.mul_(1e6)
    step(ours)
    assert_equal(ours.exp_avgs, ours.grads)


def test_nan_reaches_the_largest_square_as_in_torch():
    ours = adam_tensors(GROUPS[:1])
    for grad in ours.grads:
        grad.fill_(torch.nan)
    adam_(ours)
    for name in ("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
        assert all(tensor is None or tensor.isnan().all() for tensor in getattr(ours, name))


def test_a_thousandth_step_is_corrected_as_in_double():
    ours = adam_tensors(GROUPS[:1])
    for step in ours.steps:
        step.fill_(1e6)
    reference = deepcopy(ours)
    adam_(ours)
    adam_reference_(reference)
    assert_close(ours.params, reference.params)
    assert all(step.item() == 1e6 + 1 for step in ours.steps)
