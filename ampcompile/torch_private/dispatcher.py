"""Queries of torch's dispatcher and of its records of registered ops; types that torch keeps in private modules."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import resolve_key
from torch._subclasses import FakeTensor as FakeTensor
from torch._subclasses import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

from . import patches

major, minor = torch.__version__.split(".")[:2]
TORCH = (int(major), int(minor))  # the installed torch release, as (2, 13)


def without_modes() -> AbstractContextManager[Any]:
    """A region whose ops no `TorchDispatchMode` around it sees: a selective checkpoint's mode would keep the results,
    and return them in place of those of the next call."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


WATCHING = (
    *("torch.utils.flop_counter", "torch.utils._debug_mode", "torch.distributed.tensor.debug._comm_mode"),
    *("torch.distributed._tools.mem_tracker", "torch.distributed._tools.fsdp2_mem_tracker"),
)
"""Modules, or their beginnings, whose dispatch modes run each operation as it is"""


def acting_mode() -> str | None:
    """Return what may do something else with operations now, and has to see them: a transform of torch.func or a
    dispatch mode, but none that only watches. None if there is nothing. About 0.1 us.
    """
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func"
    if torch._C._len_torch_dispatch_stack():
        for mode in _get_current_dispatch_mode_stack():
            if not type(mode).__module__.startswith(WATCHING):
                return type(mode).__name__
    return None


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """A region that no dispatch mode and no transform of torch.func sees."""
    active = torch._C._are_functorch_transforms_active()
    with temporarily_clear_interpreter_stack() if active else nullcontext(), without_modes():
        yield


def autocast_key(device_type: str) -> str | None:
    """The name of a device type's Autocast dispatch key, or None if torch has none for it."""
    if not torch.amp.is_autocast_available(device_type):
        return None
    return f"Autocast{torch._C._dispatch_key_for_device(device_type)}"


def has_autocast_kernel(name: str, device_type: str) -> bool:
    """Return True if the op `ns::name.overload`, which must exist, has an autocast kernel for a device type."""
    key = autocast_key(device_type)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


@cache
def is_composite(op: OpOverload) -> bool:
    """Return True if the dispatcher decomposes an op above autograd: it has a CompositeImplicitAutograd kernel."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


@cache
def may_return_argument(op: OpOverload) -> bool:
    """Return True if an op that writes nothing may return an argument: it is composite, or its schema says so."""
    aliases = any(returned.alias_info is not None for returned in op._schema.returns)
    return not op._schema.is_mutable and (aliases or is_composite(op))


def registered_autocast_dtype(op: OpOverload, device_type: str) -> torch.dtype | None:
    """The dtype given to `torch.library.register_autocast` for an op, or None if none can be found.

    Ops made with `torch.library.custom_op` keep it in their definition. For others it is a variable of the Python
    kernel; torch 2.11 keeps one such kernel for CPU and CUDA together, that of the latest registration.
    """
    definition = torch._library.custom_ops.OPDEFS.get(op._schema.name)
    if definition is not None and TORCH < (2, 13):
        return getattr(definition, f"_autocast_{device_type}_dtype", None)
    if definition is not None:
        return definition._autocast_dtype.get(device_type)
    key = autocast_key(device_type)
    kernel = op.py_kernels.get(getattr(torch._C.DispatchKey, key)) if key is not None else None
    if not inspect.isfunction(kernel):
        return None
    variables = inspect.getclosurevars(kernel).nonlocals
    return variables.get("cast_inputs") if variables.get("device_type") == device_type else None


all_op_names = torch._C._dispatch_get_all_op_names  # as `aten::add.Tensor`, of every op known now


def op_named(name: str) -> OpOverload:
    """The op `ns::name.overload`; without an overload, the default one."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def autocast_acts(device_type: str) -> bool:
    """Return True if autocast is on for a device type in this thread, and its dispatch key isn't excluded now."""
    key = getattr(torch._C.DispatchKey, autocast_key(device_type) or "Undefined")
    return torch.is_autocast_enabled(device_type) and not torch._C._dispatch_tls_is_dispatch_key_excluded(key)


def interpose(op: OpOverload, device_type: str, kernel: Callable[..., Any]) -> Callable[..., Any] | None:
    """Make tracing call `kernel` ahead of an op's own; return what it called before, None if there is one already.

    Only the Python dispatcher, which only tracing switches on, consults Python kernels. It skips the Autocast key for
    ops without a kernel there, so theirs is registered at the next key, Autograd.
    """
    at_autocast = has_autocast_kernel(op.name(), device_type)
    name = autocast_key(device_type) if at_autocast else f"Autograd{torch._C._dispatch_key_for_device(device_type)}"
    key = getattr(torch._C.DispatchKey, name or "Undefined")
    if key in op.py_kernels:
        return None
    # The dispatcher calls a kernel by the key it was registered under, such as Autograd; asked for AutogradCPU it
    # would call the fallback there, which has no gradient.
    resolved = resolve_key(op, key)
    before = op.py_kernels.get(resolved)
    patches.add_tracing_kernel(op, key, kernel)
    return before or partial(op._op_dk, resolved)


AS_A_FUNCTION = torch.ops.higher_order.auto_functionalized
"""Calls a custom op that returns nothing and writes to arguments, on copies of these unless Inductor finds no other
reader; its result is None and those arguments, in order. This first version takes them by name, in 2.11 to 2.15."""


def multiplies_into_float32(device: torch.device) -> bool:
    """Return True if `mm` and `bmm` of 16-bit matrices can write float32 on a device, by their overloads `dtype`.

    CUDA has them in torch 2.11 to 2.15, with lowerings of Inductor's; the CPU has none. ROCm's are untried.
    """
    return device.type == "cuda" and torch.version.hip is None


_INTO_OTHER = {
    getattr(torch.ops.aten, n).dtype: getattr(torch.ops.aten, n).default for n in ("mm", "bmm", "addmm", "baddbmm")
}


def without_out_dtype(op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Replace a product that writes another dtype than its operands' by one that writes theirs; keep other ops."""
    return (_INTO_OTHER[op], args[:-1]) if op in _INTO_OTHER else (op, args)


# Fake kernels that claim float32 for the gradient of a 16-bit input where only the weights are float32; the real ones,
# on all devices, give it the input's dtype (torch 2.11 to 2.15). The values are indices of that input argument.
FAKES_OF_WRONG_DTYPE: dict[Any, int] = {torch.ops.aten.native_group_norm_backward.default: 1}


def as_computed(op: Any, args: Sequence[Any], results: Any) -> Any:
    """Return an op's fake results in the dtypes that its kernel gives them."""
    if op not in FAKES_OF_WRONG_DTYPE or results[0] is None:
        return results
    dtype = args[FAKES_OF_WRONG_DTYPE[op]].dtype
    return (results[0].to(dtype), *results[1:])
