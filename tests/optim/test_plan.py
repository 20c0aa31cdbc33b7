"""What was looked at once is trusted while nothing moved, and whatever the user changes between two steps counts."""

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import ampcompile
from ampcompile.scaler.grad_scaler import GradScaler
from tests.scaler.cases import assert_close, params_with, scaled

Change = Callable[[Any, list[nn.Parameter]], Any]
OPTIMIZERS: dict[str, Callable[[Any, Any], Any]] = {
    "SGD": lambda optim, groups: optim.SGD(groups, lr=0.1, momentum=0.9),
    "SGD without momentum": lambda optim, groups: optim.SGD(groups, lr=0.1),
    "AdamW": lambda optim, groups: optim.AdamW(groups, lr=0.1),
    "Adam fused, amsgrad": lambda optim, groups: optim.Adam(groups, lr=0.1, amsgrad=True, fused=True),
}
WAYS: list[tuple[Any, Any]] = [
    (torch.optim, torch.amp.GradScaler),
    (torch.optim, GradScaler),
    (ampcompile.optim, None),
]
"""Whose optimizer and whose scaler: torch's, and what is compared with them."""


def add_group(optimizer: Any, params: list[nn.Parameter]) -> None:
    params.append(nn.Parameter(torch.full((3, 3), 0.5)))
    optimizer.add_param_group({"params": params[-1:], "lr": 0.3})


def load(optimizer: Any, params: list[nn.Parameter]) -> None:
    optimizer.load_state_dict(deepcopy(optimizer.state_dict()))


def other_state(optimizer: Any, params: list[nn.Parameter]) -> None:
    for param in params[:2]:
        for name, value in optimizer.state[param].items():
            if name != "step" and isinstance(value, torch.Tensor):
                optimizer.state[param][name] = value * 2


def swap_states(optimizer: Any, params: list[nn.Parameter]) -> None:
    state = optimizer.state
    if state:
        state[params[0]], state[params[1]] = state[params[1]], state[params[0]]


def forget_a_state(optimizer: Any, params: list[nn.Parameter]) -> None:
    optimizer.state.pop(params[1], None)


def move_to_another_group(optimizer: Any, params: list[nn.Parameter]) -> None:
    first, second = optimizer.param_groups[:2]
    second["params"].insert(0, first["params"].pop())


def set_all(name: str, value: Any) -> Change:
    def change(optimizer: Any, params: list[nn.Parameter]) -> None:
        for group in optimizer.param_groups:
            if name in group:
                group[name] = value

    return change


def transpose(optimizer: Any, params: list[nn.Parameter]) -> None:
    """At the same address: the state that there is has other strides then."""
    params[0].data = params[0].data.t()


CHANGES: dict[str, Change] = {
    "nothing": lambda optimizer, params: None,
    "copied": lambda optimizer, params: deepcopy(optimizer),
    "pickled": lambda optimizer, params: pickle.loads(pickle.dumps(optimizer)),
    "gradients elsewhere": lambda o, params: [setattr(p, "grad", torch.zeros_like(p)) for p in params],
    "a gradient is missing": lambda o, params: setattr(params[1], "grad", None),
    "all gradients are missing": lambda o, params: [setattr(p, "grad", None) for p in params],
    "a weight elsewhere": lambda o, params: setattr(params[0], "data", params[0].data.clone()),
    "a weight transposed in place": transpose,
    "frozen": lambda o, params: params[2].requires_grad_(False),
    "a group added": add_group,
    "a state loaded": load,
    "other tensors of state": other_state,
    "states swapped": swap_states,
    "a state forgotten": forget_a_state,
    "a parameter in another group": move_to_another_group,
    "a learning rate": set_all("lr", 0.01),
    "a learning rate that is a tensor": set_all("lr", torch.tensor(0.01)),
    "betas": set_all("betas", (0.5, 0.6)),
    "weight decay": set_all("weight_decay", 0.3),
    "maximize": set_all("maximize", True),
    "momentum": set_all("momentum", 0.5),
    "no momentum": set_all("momentum", 0.0),
    "amsgrad off": set_all("amsgrad", False),
    "amsgrad off in one group": lambda o, params: o.param_groups[0].update(amsgrad=False),
}


def fill(params: list[nn.Parameter], seed: int, scale: float, missing: bool) -> None:
    """In place where there is a gradient; `missing` ones stay so."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        values = torch.randn(param.shape, generator=generator) * scale
        if param.grad is not None and param.grad.stride() == param.stride():
            param.grad.copy_(values)
        elif not missing or param.grad is not None:
            param.grad = torch.empty_like(param).detach().copy_(values)


def iterate(optimizer: Any, scaler: Any, params: list[nn.Parameter]) -> None:
    if scaler is None:
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        return
    if isinstance(scaler, GradScaler):
        scaler.clip_grad_norm_(optimizer, 1.0)
    else:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 1.0)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_between_two_steps_training_is_torchs(kind: str, change: str) -> None:
    results = []
    for optim, make in WAYS:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 4), (4, 4), (5,))]
        optimizer = OPTIMIZERS[kind](optim, [{"params": params[:2]}, {"params": params[2:], "lr": 0.2}])
        scaler = None if make is None else scaled(make, init_scale=2.0**10)
        for step in range(7):
            if step == 4 and isinstance(changed := CHANGES[change](optimizer, params), torch.optim.Optimizer):
                optimizer, params = changed, [param for group in changed.param_groups for param in group["params"]]
            fill(params, step, 2.0**10 if scaler else 1.0, missing="missing" in change and step > 3)
            if any(param.grad is not None for param in params):
                iterate(optimizer, scaler, params)
        results.append((params, [optimizer.state.get(param, {}) for param in params]))
    (theirs, their_states), *found = results
    for ours, states in found:
        assert_close(ours, theirs)
        for state, expected in zip(states, their_states, strict=True):
            for name, value in expected.items():
                assert_close([state[name]], [value]) if isinstance(value, torch.Tensor) else None


def test_what_is_known_of_an_optimizer_keeps_no_tensor_alive() -> None:
    params = params_with(1.0)
    optimizer, scaler = torch.optim.AdamW(params), scaled()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    held = [params[0].grad, *optimizer.state[params[0]].values(), params[0]]
    storages = [tensor.untyped_storage()._weak_ref() for tensor in held]
    optimizer.zero_grad()
    optimizer.state.clear()
    optimizer.param_groups[0]["params"].clear()
    del params, held
    assert all(map(torch.UntypedStorage._expired, storages))
    for each in storages:
        torch.UntypedStorage._free_weak_ref(each)
