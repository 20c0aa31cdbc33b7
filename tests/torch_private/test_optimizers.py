"""Hooks are listed, and a step is put back."""

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampcompile.torch_private.optimizers import named_pre_hooks, step_hooks


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
        assert (
            set(step_hooks(optimizer)) == {*before, *hooks} and list(named_pre_hooks(optimizer).values()) == hooks[:1]
        )
    finally:
        for handle in handles:
            handle.remove()
    assert step_hooks(optimizer) == before and named_pre_hooks(object()) == {}
