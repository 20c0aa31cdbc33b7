"""Collect the tensors of an optimizer's fused step: gathered in each step, validated only when they are new."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampcompile.kernels.adam import AdamGroup, AdamTensors
from ampcompile.kernels.sgd import SgdGroup, SgdTensors
from ampcompile.torch_private import dtensors
from ampcompile.torch_private.tensor_guards import TensorGuards

from .conditions import (
    NotFusedError,
    number,
    require_kernels,
    require_no_overlap,
    require_plain_tensors,
    require_state,
)
from .masters import NARROW, Masters
from .pending import Gradients
from .steps import new_step, require_counts

Group = Mapping[str, Any]


class Family(NamedTuple):
    """The parts of collecting that differ between kinds of optimizers."""

    tensors: type[AdamTensors] | type[SgdTensors]
    settings: Callable[[Group], Any]
    """The settings of a parameter group."""
    kind: Callable[[Group], tuple[bool, ...]]
    """The settings that decide whether a step is fused, and which states it has."""
    prepare: Callable[[Any, Tensor, Group], None]
    """Makes a parameter's state as torch does, if there is none, and checks it; the first argument has all states."""
    read: Callable[[Any, Sequence[Tensor], Sequence[int]], dict[str, Any]]
    """The states of some parameters of an optimizer, by their groups' numbers; fails if one is missing."""


class Validation(NamedTuple):
    """The state of a step that was validated; the step stays valid while all of this is unchanged."""

    kind: object
    guards: TensorGuards
    addresses: list[int]
    devices: dict[torch.device, list[int]]
    """Indices of the parameters on each device."""


def collect(
    optimizer: Any, validations: dict[bool, Validation], only_grads: bool = False, masters: Masters | None = None
) -> tuple[Gradients, dict[torch.device, AdamTensors | SgdTensors], list[Tensor]]:
    """Collect the tensors of the fused step of `optimizer`: all gradients, all tensors by device, all DTensors.

    Of DTensors the first two are the local parts: each rank updates its own. A check of them would have to ask the
    other ranks, and is left to torch.

    Raises `NotFusedError` if these tensors can't be. Creates the optimizer's state where it is missing, as its own step
    would. `only_grads` is enough for a check. `validations` is kept between calls: tensors of the same kind and at the
    same addresses as last time aren't validated again. `masters`: of an optimizer that keeps them.
    """
    family = SGD if isinstance(optimizer, torch.optim.SGD) else ADAM
    groups = optimizer.param_groups
    settings = [family.settings(group) for group in groups]
    weights, grads, group_of = _with_grads(groups)
    if not grads:
        return Gradients([]), {}, []
    params, sharded = weights, not only_grads and dtensors.includes(weights)
    states = {} if only_grads else _known_states(family, masters, optimizer, weights, group_of)
    if sharded:
        params, grads = local(weights, weights), local(grads, weights)
        states = states and _local_states(states, weights)
    rows = [grads] if only_grads else [grads, params]  # a check reads gradients alone
    tensors = _all_of(rows, states)
    kind = [*map(family.kind, groups), group_of, amp_aware(optimizer), sharded, masters]
    last = validations.get(only_grads)
    if states is None or last is None or last.kind != kind or not last.guards.hold(tensors):
        last = None
        require_right_tensors(params, grads, allow_fp16=amp_aware(optimizer) and not sharded, masters=masters)
        if not only_grads:
            if family is ADAM:
                require_counts(optimizer, {param.device for param in params}, own_step=masters is None)
            if masters is not None:
                masters.widen_states(optimizer)
            for weight, index in zip(weights, group_of, strict=True):
                family.prepare(optimizer.state, weight, groups[index])
            if masters is not None:
                masters.prepare(optimizer, weights)
        states = {} if only_grads else _read(family, masters, optimizer, weights, group_of)
        if sharded:
            states = _local_states(states, weights)
        tensors = _all_of(rows, states)
    addresses = list(map(Tensor.data_ptr, tensors))
    if last is None or last.addresses != addresses:
        if last is not None:
            require_no_overlap(params)
            require_no_overlap(grads)
        guards = TensorGuards(tensors) if last is None else last.guards
        last = validations[only_grads] = Validation(kind, guards, addresses, _places(params))
    lists = {"params": params, "grads": grads, "group_of": group_of, **states}
    work = {
        device: family.tensors(settings, **(lists if len(places) == len(params) else _chosen(lists, places)), same=last)
        for device, places in last.devices.items()
    }
    return Gradients(grads, addresses[: len(grads)]), work, weights if sharded else []


def local(tensors: Sequence[Any], weights: Sequence[Tensor]) -> list[Any]:
    """Return this rank's parts of gradients, states or the weights themselves."""
    if (parts := dtensors.local_parts(tensors, weights)) is None:
        raise NotFusedError("a gradient or a state isn't distributed over the ranks as its parameter is")
    return parts


def _local_states(states: dict[str, Any], weights: Sequence[Tensor]) -> dict[str, Any]:
    plain = ("steps", "checksums")
    return {name: local(row, row if name in plain else weights) for name, row in states.items()}


def require_right_tensors(
    params: list[Tensor], grads: list[Tensor], allow_fp16: bool, masters: Masters | None = None
) -> None:
    """Raise where the kernels can't take these weights and gradients."""
    dtypes = (torch.float32,) if masters is None else (torch.float32, *NARROW)
    for param, grad in zip(params, grads, strict=True):
        require_plain_tensors(param, grad, dtypes)
    # torch unscales float16 gradients only inside fused optimizers; elsewhere torch raises an error.
    if not allow_fp16 and any(grad.dtype is torch.float16 for grad in grads):
        raise NotFusedError("gradients are float16")
    require_kernels({param.device.type for param in params})
    require_no_overlap(params)
    require_no_overlap(grads)


def amp_aware(optimizer: Any) -> bool:
    """Return True if an optimizer unscales and skips by itself, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _with_grads(groups: Sequence[Group]) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Return the parameters that have gradients, these gradients, and the indices of their groups."""
    params = [param for group in groups for param in group["params"]]
    grads = [param.grad for param in params]
    group_of = [index for index, group in enumerate(groups) for _ in group["params"]]
    if all(present := [grad is not None for grad in grads]):
        return params, grads, group_of
    return list(compress(params, present)), list(compress(grads, present)), list(compress(group_of, present))


def _known_states(family: Family, masters: Masters | None, *of: Any) -> dict[str, Any] | None:
    try:
        return _read(family, masters, *of)
    except (KeyError, TypeError):  # some states don't exist yet
        return None


def _read(
    family: Family, masters: Masters | None, optimizer: Any, params: list[Tensor], group_of: list[int]
) -> dict[str, Any]:
    kept = {} if masters is None else masters.read(_states(optimizer.state, params), params)
    return {**family.read(optimizer, params, group_of), **kept}


def _all_of(rows: list[list[Tensor]], states: dict[str, Any] | None) -> list[Tensor]:
    rows = [*rows, *(states or {}).values()]
    return [tensor for row in rows for tensor in row if tensor is not None]


def _places(params: list[Tensor]) -> dict[torch.device, list[int]]:
    places: dict[torch.device, list[int]] = {}
    for i, param in enumerate(params):
        places.setdefault(param.device, []).append(i)
    return places


def _chosen(lists: dict[str, Any], places: list[int]) -> dict[str, list[Any]]:
    return {name: [row[i] for i in places] for name, row in lists.items()}


def learning_rate(value: float | Tensor) -> float | Tensor:
    """A learning rate as a number or, so that a captured graph sees it change, as a tensor on the GPU."""
    on_gpu = isinstance(value, Tensor) and value.is_cuda and not value.requires_grad
    return value if on_gpu else number(value)


def _adam_settings(group: Group) -> AdamGroup:
    beta1, beta2 = group["betas"]
    return AdamGroup(
        learning_rate(group["lr"]),
        number(beta1),
        number(beta2),
        group["eps"],
        number(group["weight_decay"]),
        group["decoupled_weight_decay"],
        group["maximize"],
    )


def _prepare_adam(states: Any, param: Tensor, group: Group) -> None:
    state = states[param]
    if not state:
        state["step"] = new_step(param, group)
        for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
            state[name] = torch.zeros_like(param, dtype=torch.float32)
    step = state.get("step")
    if not isinstance(step, Tensor) or step.dtype != torch.float32 or step.numel() != 1:
        raise NotFusedError("its step counts aren't float32 tensors")
    if step.device != param.device:
        state["step"] = step.to(param.device, non_blocking=True)
    for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
        require_state(state.get(name), param)


def _read_adam(optimizer: Any, params: Sequence[Tensor], group_of: Sequence[int]) -> dict[str, Any]:
    states = _states(optimizer.state, params)
    means, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
    peaks: list[Tensor | None] = [None] * len(params)
    if any(amsgrad := [group["amsgrad"] for group in optimizer.param_groups]):
        peaks = [s["max_exp_avg_sq"] if amsgrad[i] else None for s, i in zip(states, group_of, strict=True)]
    return {"exp_avgs": means, "exp_avg_sqs": squares, "max_exp_avg_sqs": peaks, "steps": steps}


def _states(states: Any, params: Sequence[Tensor]) -> list[Any]:
    """Return the states of `params`; one by one only if their order differs, as hashing a tensor runs Python code."""
    if len(states) == len(params) and all(map(operator.is_, states, params)):
        return list(states.values())
    return list(map(states.get, params))


def _sgd_settings(group: Group) -> SgdGroup:
    return SgdGroup(
        learning_rate(group["lr"]),
        group["momentum"],
        group["dampening"],
        group["nesterov"],
        number(group["weight_decay"]),
        group["maximize"],
    )


def _prepare_sgd(states: Any, param: Tensor, group: Group) -> None:
    """Create a momentum of zeros, with which the first step equals torch's, or check the one there is."""
    assert param.grad is not None
    mixed = param.grad.dtype != param.dtype == torch.float32 and not group["fused"]  # torch's fused step raises
    if mixed and group["weight_decay"] and group["maximize"]:
        raise NotFusedError(f"torch decays weights in {param.grad.dtype}, the gradients' type")
    if group["momentum"] == 0:
        return
    state = states[param]
    if state.get("momentum_buffer") is None:
        if group["dampening"] != 0:
            raise NotFusedError("a first step with dampening isn't like the others")
        if mixed and not group["weight_decay"]:
            raise NotFusedError(f"torch keeps momentum in {param.grad.dtype}, the gradients' type")
        state["momentum_buffer"] = torch.zeros_like(param, dtype=torch.float32)
    require_state(state["momentum_buffer"], param)


def _read_sgd(optimizer: Any, params: Sequence[Tensor], group_of: Sequence[int]) -> dict[str, Any]:
    moving = [group["momentum"] != 0 for group in optimizer.param_groups]
    states = optimizer.state
    buffers = [states[p]["momentum_buffer"] if moving[i] else None for p, i in zip(params, group_of, strict=True)]
    return {"momentum_buffers": buffers}


ADAM = Family(
    AdamTensors,
    _adam_settings,
    lambda group: (group["amsgrad"], group["fused"], group["capturable"]),
    _prepare_adam,
    _read_adam,
)
SGD = Family(
    SgdTensors,
    _sgd_settings,
    lambda group: (group["momentum"] != 0, bool(group["weight_decay"]), group["maximize"], group["fused"]),
    _prepare_sgd,
    _read_sgd,
)
