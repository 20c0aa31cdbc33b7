"""A clipping that waits for the step belongs to its gradients: it is applied, dropped with them, or refused aloud.

What torch's clipping and step do with such gradients, `tests/scaler/test_differential.py` compares.
"""

import math
import pickle
from copy import deepcopy

import pytest
import torch

import ampcompile
from ampcompile.errors import ClipError
from ampcompile.torch_private import optimizers
from tests.pairs import pairs
from tests.scaler.cases import KINDS, assert_close, params, params_with, pending, scaled

FUSED = KINDS[:3]


def backward(optimizer, *values, scale=1.0):
    """New gradients: added where there are some, as backward does."""
    for param, value in zip(params(optimizer), values, strict=True):
        (param.sum() * value * scale).backward()


def scaler_of(enabled):
    return scaled(enabled=enabled, init_scale=4.0)


# A step that was left out


@pytest.mark.parametrize(
    ("kind", "to_none", "end", "bad"), pairs(KINDS, [False, True], ["update", "nothing"], [10.0, math.inf, math.nan])
)
def test_without_scaling_a_left_out_step_takes_its_clipping_along(kind, to_none, end, bad):
    """The loop of bfloat16 training with the usual guard: the next norm is right, and the weights stay finite."""
    ours, plain = kind(params_with(None, None)), kind(params_with(None, None))
    scaler = scaler_of(enabled=False)
    for i, value in enumerate((1.0, bad, bad, 2.0, 0.1)):
        for optimizer in (ours, plain):
            optimizer.zero_grad(set_to_none=to_none)
            backward(optimizer, value, 2 * value)
        expected = torch.nn.utils.clip_grad_norm_(params(plain), 1.0)
        torch.testing.assert_close(scaler.clip_grad_norm_(ours, 1.0), expected, equal_nan=True)
        if i not in (1, 2):
            scaler.step(ours)
            plain.step()
        if end == "update":
            scaler.update()
        assert_close(params(ours), params(plain))
    assert all(param.isfinite().all() for param in params(ours))


# Gradients that changed before the step


CHANGES = {
    "written": lambda param: param.grad.add_(1.0),
    "accumulated": lambda param: param.sum().backward(),
    "replaced": lambda param: setattr(param, "grad", param.grad.clone()),
    "given other data": lambda param: setattr(param.grad, "data", param.grad.clone()),
    "set on other memory": lambda param: param.grad.set_(param.grad.clone()),
    "another object with its values": lambda param: setattr(param, "grad", param.grad + 0),
    "scaled by torch": lambda param: torch.nn.utils.clip_grad_norm_([param], 0.1),
}


@pytest.mark.parametrize(
    ("kind", "enabled", "change", "how"),
    pairs(FUSED, [False, True], list(CHANGES), ["scaler.step", "a generic step", "optimizer.step"]),
)
def test_a_step_on_other_gradients_is_refused(kind, enabled, change, how):
    scaler, optimizer = scaler_of(enabled), kind(params_with(8.0, 8.0))
    scaler.clip_grad_norm_(optimizer, 1.0)
    CHANGES[change](params(optimizer)[1])
    if how == "a generic step":
        optimizer.register_step_post_hook(lambda *_: None)
    for _ in range(2):
        with pytest.raises(
            ClipError, match=r"written or replaced since clip_grad_norm_\(\).*call update\(\) at the end"
        ):
            optimizer.step() if how == "optimizer.step" else scaler.step(optimizer)
    assert all((param == 1).all() for param in params(optimizer))
    scaler.update()
    scaler.step(optimizer)
    assert not any((param == 1).any() for param in params(optimizer))


# Who may take the step


def test_a_step_on_some_of_the_gradients_leaves_them_those_of_this_iteration():
    """They are clipped again, in place, and no others."""
    scaler, optimizer = scaler_of(enabled=True), torch.optim.SGD(params_with(8.0, 8.0), lr=1.0)
    scaler.clip_grad_norm_(optimizer, 1.0)
    params(optimizer)[0].grad = None
    optimizer.step()
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(0.5**0.5)
    params(optimizer)[1].grad.add_(1.0)
    with pytest.raises(ClipError, match="found new gradients"):
        scaler.clip_grad_norm_(optimizer, 1.0)


def test_a_hook_that_is_registered_after_the_clipping_sees_clipped_gradients():
    scaler, optimizer, seen = scaler_of(enabled=True), torch.optim.SGD(params_with(8.0), lr=1.0), []
    for _ in range(2):
        params(optimizer)[0].grad = torch.full((3,), 8.0)
        scaler.clip_grad_norm_(optimizer, 1.0)
        handle = optimizer.register_step_pre_hook(lambda *_: seen.append(params(optimizer)[0].grad.norm().item()))
        optimizer.step()
        scaler.update()
        handle.remove()
    assert seen == pytest.approx([1.0, 1.0])


def test_a_pending_clipping_is_no_part_of_an_optimizers_pickle_and_keeps_no_gradient_alive():
    scaler, optimizer = scaler_of(enabled=False), torch.optim.AdamW(params_with(3.0))
    scaler.clip_grad_norm_(optimizer, 1.0)
    assert pending(pickle.loads(pickle.dumps(optimizer))) is None and pending(deepcopy(optimizer)) is None
    storage = params(optimizer)[0].grad.untyped_storage()
    users = torch._C._storage_Use_Count(storage._cdata)
    optimizer.zero_grad()
    assert torch._C._storage_Use_Count(storage._cdata) == users - 1 == 1


OURS = [ampcompile.optim.SGD, ampcompile.optim.AdamW]


@pytest.mark.parametrize(
    ("kind", "values", "clips"), pairs(OURS, [None, 0.1, 3.0, math.inf, math.nan], ["ours", "torch's", "no", "twice"])
)
def test_gradients_that_are_refilled_without_a_version_get_no_clipping_of_before(kind, values, clips):
    """As a replayed graph's static gradients are; those that are the same are clipped already."""
    ours = kind(params_with(8.0, 4.0), lr=0.1)
    plain = optimizers.torchs_class(ours)(params_with(8.0, 4.0), lr=0.1)
    torch.testing.assert_close(ours.clip_grad_norm_(1.0), torch.nn.utils.clip_grad_norm_(params(plain), 1.0))
    ours.step(), plain.step()
    for optimizer in (ours, plain):
        for param in params(optimizer) if values is not None else ():
            param.grad.data.copy_(torch.tensor([values, -values, 0.0]))
    for _ in range({"no": 0, "twice": 2}.get(clips, 1)):
        norm_type = 1.0 if clips == "torch's" else 2.0
        expected = torch.nn.utils.clip_grad_norm_(params(plain), 0.5, norm_type)
        torch.testing.assert_close(ours.clip_grad_norm_(0.5, norm_type), expected, equal_nan=True)
    ours.step(), plain.step()
    torch.testing.assert_close(params(ours), params(plain), equal_nan=True)
