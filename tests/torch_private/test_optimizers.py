"""Hooks of others are told from ours, and a step is put back."""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampcompile.torch_private.optimizers import foreign_hook, named_pre_hooks


@pytest.mark.parametrize(
    "register",
    [
        lambda optimizer, hook: optimizer.register_step_pre_hook(hook),
        lambda optimizer, hook: optimizer.register_step_post_hook(hook),
        lambda _, hook: register_optimizer_step_pre_hook(hook),
        lambda _, hook: register_optimizer_step_post_hook(hook),
    ],
)
def test_a_hook_of_this_or_of_all_optimizers_is_told_from_ours(register) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    before, hook, ours = foreign_hook(optimizer), lambda *_: None, lambda *_: None
    ours.__module__ = "ampcompile.ours"
    handles = [register(optimizer, ours)]
    try:
        assert before is foreign_hook(optimizer) is None
        handles.append(register(optimizer, hook))
        assert foreign_hook(optimizer) is hook
        assert set(named_pre_hooks(optimizer).values()) <= {hook, ours} and named_pre_hooks(object()) == {}
    finally:
        for handle in handles:
            handle.remove()
    assert foreign_hook(optimizer) is None
