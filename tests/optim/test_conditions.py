"""What our kernels can't take over goes torch's way, says why, and computes what torch computes."""

import logging
from collections import OrderedDict, defaultdict

import pytest
import torch
from torch import nn

from ampcompile.scaler.grad_scaler import GradScaler
from tests.scaler.cases import assert_equal, scaled


class Subclass(torch.optim.AdamW):
    pass


class Wrapped(torch.Tensor):
    """A tensor subclass of no other use."""


def adamw(*params, **options):
    return torch.optim.AdamW(list(params), lr=0.1, **options)


def weight(*shape):
    return nn.Parameter(torch.randn(*shape))


def with_grad(param, grad):
    param.grad = grad
    return param


def shared(param):
    return nn.Parameter(param.detach())


def changed(change):
    """An AdamW of one weight, after a change."""
    optimizer = adamw(weight(3))
    change(optimizer)
    return optimizer


def patch_step(optimizer):
    step = optimizer.step
    optimizer.step = lambda closure=None: step(closure)


def with_grad_scale(optimizer):
    """By the user, for one step: torch's scaler multiplies it by its own."""
    optimizer.grad_scale = torch.tensor(8.0)
    return optimizer


def with_state(key, value, *shape):
    """An AdamW whose weight's state has this tensor."""
    optimizer = adamw(param := weight(*shape or (3,)))
    state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(param.shape), "exp_avg_sq": torch.zeros(param.shape)}
    optimizer.state[param] = {**state, key: value}
    return optimizer


CASES = {
    "Subclass isn't torch's": lambda: Subclass([weight(3)]),
    "a step hook is registered": lambda: changed(lambda o: o.register_step_post_hook(lambda *_: None)),
    "its step is wrapped by": lambda: changed(patch_step),
    "grad_scale or found_inf is set on it": lambda: with_grad_scale(adamw(weight(3), fused=True)),
    "it is differentiable": lambda: adamw(torch.randn(3), differentiable=True),
    "a parameter is torch.float64": lambda: adamw(nn.Parameter(torch.randn(3, dtype=torch.float64))),
    "a parameter is torch.bfloat16": lambda: adamw(nn.Parameter(torch.randn(3, dtype=torch.bfloat16))),
    "a gradient is torch.sparse_coo": lambda: torch.optim.SGD(
        [with_grad(weight(3), torch.sparse_coo_tensor([[1]], [2.0], (3,), check_invariants=True))]
    ),
    "a parameter is a Wrapped": lambda: adamw(nn.Parameter(torch.randn(3).as_subclass(Wrapped))),
    "a parameter has strides": lambda: adamw(with_grad(weight(3, 4), torch.randn(4, 3).t())),
    "two parameters share memory": lambda: adamw(a := weight(3), shared(a)),
    "its state has other strides": lambda: with_state("exp_avg", torch.zeros(4, 3).t(), 3, 4),
    "its step counts aren't float32": lambda: with_state("step", torch.tensor(1.0, dtype=torch.float64)),
    "its state isn't float32": lambda: with_state("exp_avg", torch.zeros(3).as_subclass(Wrapped)),
    "its state is a negated view": lambda: with_state("exp_avg", torch._neg_view(torch.ones(3))),
    "a first step with dampening": lambda: torch.optim.SGD([weight(3)], 0.1, momentum=0.9, dampening=0.5),
    "a hyper-parameter is a tensor that requires grad": lambda: torch.optim.SGD(
        [weight(3)], torch.tensor(0.1, requires_grad=True), foreach=False
    ),
    "a hyper-parameter is a tensor of torch.bfloat16": lambda: torch.optim.AdamW(
        [weight(3)], torch.tensor(0.1).bfloat16()
    ),
    "a hyper-parameter is a tensor of torch.float16": lambda: adamw(
        weight(3), betas=(torch.tensor(0.9).half(), torch.tensor(0.99).half()), foreach=False
    ),
}


PLAIN = "aren't plain tensors in lists and dicts"
UNUSUAL = {
    "groups": lambda o: setattr(o, "param_groups", tuple(o.param_groups)),
    "parameters": lambda o: o.param_groups[0].update(params=tuple(o.param_groups[0]["params"])),
    "a state": lambda o: setattr(o, "state", defaultdict(OrderedDict)),
    "a parameter that has no gradient": lambda o: o.add_param_group(
        {"params": [nn.Parameter(torch.randn(3).as_subclass(Wrapped), requires_grad=False)]}
    ),
}
GENERIC = [
    *(pytest.param(make, reason, False, id=reason) for reason, make in CASES.items()),
    *(
        pytest.param(lambda change=change: changed(change), PLAIN, clips, id=f"{what}, {clips}")
        for what, change in UNUSUAL.items()
        for clips in (False, True)
    ),
]


@pytest.mark.parametrize(("make", "reason", "clips"), GENERIC)
def test_the_generic_path_equals_torch_bit_for_bit_and_the_log_says_why(make, reason, clips, caplog):
    runs = []
    caplog.set_level(logging.INFO, "ampcompile")
    for kind in (GradScaler, torch.amp.GradScaler):
        torch.manual_seed(0)
        optimizer, scaler = make(), scaled(kind, init_scale=4.0)
        params = list(optimizer.param_groups[0]["params"])
        for _ in range(2):
            for param in params:
                if param.grad is None or not (param.grad.is_sparse or not param.grad.is_contiguous()):
                    param.grad = torch.randn_like(param).detach()
            versions = [param._version for param in params]
            if clips and kind is GradScaler:
                scaler.clip_grad_norm_(optimizer, 1.0)
            elif clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(params, 1.0)
            with torch.no_grad():
                scaler.step(optimizer)
            scaler.update()
            raised = [param._version > before for param, before in zip(params, versions, strict=True)]
            assert all(raised) or optimizer.defaults["fused"]  # torch's fused step raises none
            if reason.startswith(("a first step", "grad_scale")):
                break
        runs.append([param.detach() for param in params])
    assert_equal(*runs)
    assert caplog.text.count(reason) == 1  # said once, not at every step
    assert type(optimizer).__name__ in caplog.text


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float16])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_gradients_of_these_types_are_refused_as_torch_refuses_them(kind, dtype):
    messages = []
    for scaler in (scaled(GradScaler), scaled(torch.amp.GradScaler)):
        params = [nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones(3))]
        for param in params:
            param.grad = torch.ones_like(param).detach()
        with pytest.raises((NotImplementedError, ValueError)) as error:
            scaler.step(kind(params, lr=0.1))
        messages.append((error.type, str(error.value)))
        assert dtype != torch.float16 or (params[1].grad == 1).all()
    assert messages[0] == messages[1]
