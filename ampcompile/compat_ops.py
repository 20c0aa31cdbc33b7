"""What torch's dispatcher and its records of registered ops tell, all of it private."""

import inspect

import torch
from torch._ops import OpOverload

major, minor = torch.__version__.split(".")[:2]
TORCH = (int(major), int(minor))
"""The installed torch release, as (2, 13)."""


def autocast_key(device_type: str) -> str | None:
    """The name of a device type's Autocast dispatch key, or None if torch has none for it."""
    if not torch.amp.is_autocast_available(device_type):
        return None
    return f"Autocast{torch._C._dispatch_key_for_device(device_type)}"


def has_autocast_kernel(name: str, device_type: str) -> bool:
    """Whether the op `ns::name.overload`, which must exist, has an autocast kernel for a device type."""
    key = autocast_key(device_type)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def is_composite(op: OpOverload) -> bool:
    """Whether the dispatcher takes an op apart above autograd: it has a CompositeImplicitAutograd kernel."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def registered_autocast_dtype(op: OpOverload, device_type: str) -> torch.dtype | None:
    """The dtype given to `torch.library.register_autocast` for an op, or None if none can be found.

    Ops made with `torch.library.custom_op` keep it in their definition. For others it is a variable of the Python
    kernel; torch 2.11 keeps one such kernel for CPU and CUDA together, that of the latest registration.
    """
    definition = torch._library.custom_ops.OPDEFS.get(op._schema.name)
    if definition is not None:
        return definition._autocast_dtype.get(device_type)
    key = autocast_key(device_type)
    kernel = op.py_kernels.get(getattr(torch._C.DispatchKey, key)) if key is not None else None
    if not inspect.isfunction(kernel):
        return None
    variables = inspect.getclosurevars(kernel).nonlocals
    return variables.get("cast_inputs") if variables.get("device_type") == device_type else None
