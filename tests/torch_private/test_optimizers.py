"""Hooks are listed, and a step is put back."""

import pickle

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampcompile.torch_private.optimizers import pre_hooks, replace_step, restore_step, step_hooks


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


def test_a_step_is_replaced_on_one_optimizer_and_restored() -> None:
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(first, 0.5)
    own = vars(first)["step"]
    before = replace_step(first, lambda: "ours", lambda protocol: (str, ("a copy",)))
    assert first.step() == "ours" and pickle.loads(pickle.dumps(first)) == "a copy"
    assert first._step_supports_amp_scaling and not hasattr(second, "_step_supports_amp_scaling")
    restore_step(first, before)
    assert first.step is own and vars(second).keys().isdisjoint(["step"]) and scheduler.optimizer is first
    assert pickle.loads(pickle.dumps(first)).param_groups[0]["lr"] == 0.1
