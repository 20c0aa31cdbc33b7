"""An optimizer's hooks are listed, its gradients recognized, and storages held weakly keep their ids to themselves."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampcompile.torch_private.optimizers import WeakStorages, fresh_optimizer_states, marks, pre_hooks, step_hooks


def test_hooks_of_this_and_of_all_optimizers_are_listed() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    before, hooks = step_hooks(optimizer), [lambda *_: None for _ in range(4)]
    handles = [
        optimizer.register_step_pre_hook(hooks[0]),
        optimizer.register_step_post_hook(hooks[1]),
        register_optimizer_step_pre_hook(hooks[2]),
        register_optimizer_step_post_hook(hooks[3]),
    ]
    try:
        assert set(step_hooks(optimizer)) == {*before, *hooks} and pre_hooks(optimizer) == hooks[:1]
    finally:
        for handle in handles:
            handle.remove()
    assert step_hooks(optimizer) == before and pre_hooks(object()) == []


def test_the_states_of_an_iteration_are_fresh_and_pickle() -> None:
    states = pickle.loads(pickle.dumps(fresh_optimizer_states()))
    assert states[3] == {"stage": OptState.READY, "found_inf_per_device": {}} and states[3] is not states[4]


@pytest.mark.parametrize(
    "change",
    [lambda x: x.add_(1), lambda x: setattr(x, "data", x.clone()), lambda x: x.set_(x[1:])],
    ids=["add_", "data", "set_"],
)
def test_a_mark_changes_with_each_write_and_replacement(change: Callable[[Tensor], Any]) -> None:
    x, sparse = torch.ones(3), torch.eye(2).to_sparse()
    before = marks([x])
    assert marks([x.detach()]) == before != [None] and marks([sparse, x]) == [None, *before]
    change(x)
    assert marks([x]) != before


def test_storages_held_weakly_may_be_freed_and_sparse_tensors_have_none() -> None:
    x = torch.ones(3)
    weak = WeakStorages([x, torch.eye(2).to_sparse()])
    (held,) = weak.held
    assert held == x.untyped_storage()._cdata and not torch.UntypedStorage._expired(held)
    del x
    assert torch.UntypedStorage._expired(held)
