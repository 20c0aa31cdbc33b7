"""Conditions under which our kernels may replace an optimizer's own step, and the reasons where they may not."""

import importlib.util
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompile.kernels import native, planned
from ampcompile.kernels.planned import share_memory
from ampcompile.torch_private import dispatcher, optimizers, storages

PLAIN = (torch.nn.Parameter, Tensor)
GRAD_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class NotFusedError(Exception):
    """The reason that a step is torch's own; never leaves the two rooms of steps."""


def foreign_part(optimizer: Any) -> str | None:
    """Return what in the step of an optimizer isn't torch's or ours, a patch or a hook; None if all is."""
    if (wrapper := optimizers.foreign_step(optimizer)) is not None:
        return f"its step is wrapped by {wrapper}"
    if (hook := optimizers.foreign_hook(optimizer)) is not None:
        return f"a step hook is registered: {hook}"
    return None


def obstacle_of(optimizer: Any) -> str | None:
    """Return why an optimizer can't take a scaler's scale and overflow flag in a fused step; None if nothing is so."""
    known = getattr(optimizer, "_ampcompile_step", None)
    if known is None and type(optimizer) not in optimizers.TORCHS:
        return f"{type(optimizer).__name__} isn't torch's SGD, Adam or AdamW, nor ours"
    if known is None and (step := optimizers.replaced_step(optimizer)) is not None:
        return f"its step is wrapped by {step}"
    if known is None or known.optimizer() is optimizer:
        if (foreign := foreign_part(optimizer)) is not None:
            return foreign
        preset = hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf")
        return "grad_scale or found_inf is set on it" if preset else None
    return f"it is wrapped in a {type(optimizer).__name__}"


def require_no_mode() -> None:
    """Raise under a transform of torch.func, and under a dispatch mode that does more than watch."""
    if (mode := dispatcher.acting_mode()) is not None:
        raise NotFusedError(f"{mode} has to see its operations")


def require_tensors(name: str, tensors: Sequence[Tensor], dtypes: Collection[torch.dtype]) -> None:
    """Raise where the kernels can't take these parameters or gradients: they read dense tensors on one device, in any
    order, so no element may occur twice.
    """
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            raise NotFusedError(f"a {name} is a {type(tensor).__name__}")
        if storages.is_wrapped(tensor):
            raise NotFusedError(f"a {name} is one of a transform of torch.func")
        if tensor.layout is not torch.strided:
            raise NotFusedError(f"a {name} is {tensor.layout}")
        if tensor.is_neg() or tensor.is_inference():
            raise NotFusedError(f"a {name} is a negated view or an inference tensor")
        if tensor.dtype not in dtypes:
            raise NotFusedError(f"a {name} is {tensor.dtype}")
        if not (tensor.is_contiguous() or storages.is_dense(tensor)):  # the second takes long
            raise NotFusedError(f"a {name} has strides {tensor.stride()}")
    if len(devices := {tensor.device for tensor in tensors}) > 1:
        raise NotFusedError(f"{name}s are on {' and '.join(sorted(map(str, devices)))}")
    for device_type in (device.type for device in devices):
        if device_type not in ("cpu", "cuda"):
            raise NotFusedError(f"there are no fused kernels for {device_type}")
        if not planned.available() or (device_type == "cpu" and not native.available()):
            raise NotFusedError("no C++ compiler works here")
        if device_type == "cuda" and importlib.util.find_spec("triton") is None:
            raise NotFusedError("triton isn't installed")
    if share_memory(tensors):
        raise NotFusedError(f"two {name}s share memory")


def require_alike(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Raise where the kernels can't take gradients with their parameters: both have one device and layout."""
    for param, grad in zip(params, grads, strict=True):
        if grad.device != param.device:
            raise NotFusedError("a gradient is on another device than its parameter")
        if not same_layout(grad, param):
            raise NotFusedError(f"a parameter has strides {param.stride()}, its gradient {grad.stride()}")


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Return True if dense tensors have elements at equal offsets; strides of dimensions of size 1 don't matter."""
    if a.is_contiguous() and b.is_contiguous():
        return a.numel() == b.numel()
    if a.shape != b.shape:
        return False
    return all(size < 2 or x == y for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True))


def require_state(state: Any, param: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Raise unless a tensor of a parameter's state is as torch's optimizers make it."""
    if (parts := storages.local_parts([state, param], [param, param])) is None:
        raise NotFusedError("its state isn't distributed over the ranks as the parameters are")
    state, param = parts
    if type(state) is not Tensor or storages.is_wrapped(state) or state.dtype != dtype or state.device != param.device:
        name = str(dtype).removeprefix("torch.")
        raise NotFusedError(f"its state isn't {name} tensors on the parameters' device")
    if not same_layout(state, param):
        raise NotFusedError("its state has other strides than the parameters")


def number(value: float | Tensor) -> float:
    """A hyper-parameter as a number, without a host sync."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype in (torch.float16, torch.bfloat16):
        raise NotFusedError(f"a hyper-parameter is a tensor of {value.dtype}, in which torch computes with it")
    if value.requires_grad or not value.is_cpu:
        raise NotFusedError("a hyper-parameter is a tensor that requires grad, or isn't on the CPU")
    return float(value.reshape(()).numpy())
