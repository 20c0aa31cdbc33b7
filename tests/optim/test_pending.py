"""A clipping that waits for the step belongs to its gradients: it is applied, dropped with them, or refused aloud.

What torch's clipping and step do with such gradients, `test_machine.py` compares.
"""

import pickle
from copy import deepcopy

import pytest
import torch

import ampcompile
from ampcompile.errors import OptimizerError
from tests.pairs import pairs
from tests.scaler.cases import KINDS, params, params_with, pending, scaled

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
    pairs(KINDS[:3], [False, True], list(CHANGES), ["scaler.step", "a generic step", "optimizer.step"]),
)
def test_a_step_on_other_gradients_is_refused(kind, enabled, change, how):
    scaler, optimizer = scaled(enabled=enabled, init_scale=4.0), kind(params_with(8.0, 8.0))
    scaler.clip_grad_norm_(optimizer, 1.0)
    CHANGES[change](params(optimizer)[1])
    if how == "a generic step":
        optimizer.register_step_post_hook(lambda *_: None)
    for _ in range(2):
        with pytest.raises(
            OptimizerError, match=r"written or replaced since clip_grad_norm_\(\).*Clip again.*call update"
        ):
            optimizer.step() if how == "optimizer.step" else scaler.step(optimizer)
    assert all((param == 1).all() for param in params(optimizer))
    if enabled or how != "optimizer.step":
        scaler.update()
    else:
        optimizer.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    assert not any((param == 1).any() for param in params(optimizer))


def test_a_step_on_some_of_the_gradients_leaves_them_those_of_this_iteration():
    """They are clipped again, in place, and no others."""
    scaler, optimizer = scaled(init_scale=4.0), torch.optim.SGD(params_with(8.0, 8.0), lr=1.0)
    scaler.clip_grad_norm_(optimizer, 1.0)
    params(optimizer)[0].grad = None
    optimizer.step()
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(0.5**0.5)
    params(optimizer)[1].grad.add_(1.0)
    with pytest.raises(OptimizerError, match="found new gradients"):
        scaler.clip_grad_norm_(optimizer, 1.0)


def test_gradients_without_a_version_are_refused_once_where_others_were_dropped_after_the_step():
    """None can tell if they are those of the clipping: a factor of before would make the update too small."""
    optimizer = ampcompile.optim.SGD(params_with(8.0, 8.0), lr=1.0)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    before = params(optimizer)[0].clone()
    params(optimizer)[0].grad.data.fill_(0.25)
    params(optimizer)[1].grad = None
    with pytest.raises(OptimizerError, match="Clip again after the last change"):
        optimizer.step()
    optimizer.step()
    torch.testing.assert_close(before - params(optimizer)[0], torch.full((3,), 0.25))


def test_a_hook_that_is_registered_after_the_clipping_sees_clipped_gradients():
    scaler, optimizer, seen = scaled(init_scale=4.0), torch.optim.SGD(params_with(8.0), lr=1.0), []
    for _ in range(2):
        params(optimizer)[0].grad = torch.full((3,), 8.0)
        scaler.clip_grad_norm_(optimizer, 1.0)
        handle = optimizer.register_step_pre_hook(lambda *_: seen.append(params(optimizer)[0].grad.norm().item()))
        optimizer.step()
        scaler.update()
        handle.remove()
    assert seen == pytest.approx([1.0, 1.0])


def test_a_pending_clipping_is_no_part_of_an_optimizers_pickle_and_keeps_no_gradient_alive():
    scaler, optimizer = scaled(enabled=False), torch.optim.AdamW(params_with(3.0))
    scaler.clip_grad_norm_(optimizer, 1.0)
    assert pending(pickle.loads(pickle.dumps(optimizer))) is None and pending(deepcopy(optimizer)) is None
    storage = params(optimizer)[0].grad.untyped_storage()
    users = torch._C._storage_Use_Count(storage._cdata)
    optimizer.zero_grad()
    assert torch._C._storage_Use_Count(storage._cdata) == users - 1 == 1


def test_what_is_known_of_an_optimizer_keeps_no_tensor_alive():
    held, scaler = params_with(1.0), scaled()
    optimizer = torch.optim.AdamW(held)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    storages = [
        tensor.untyped_storage()._weak_ref() for tensor in (held[0].grad, *optimizer.state[held[0]].values(), held[0])
    ]
    optimizer.zero_grad()
    optimizer.state.clear()
    optimizer.param_groups[0]["params"].clear()
    held.clear()
    assert all(map(torch.UntypedStorage._expired, storages))
    for each in storages:
        torch.UntypedStorage._free_weak_ref(each)
