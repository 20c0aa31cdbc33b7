"""Read autocast's state in this thread, and keep autocast from acting."""

import contextlib
import functools
import operator
from collections.abc import Iterator

import torch

_INERT_DEVICE = "ipu"  # has autocast state, and no kernels in any torch build since 2.3


autocast_off = torch._C._DisableAutocast  # a region with every Autocast dispatch key excluded
is_available = functools.cache(torch.amp.is_autocast_available)  # for a device type; asked at every call


def is_on(device_type: str) -> bool:
    """Return True if autocast is on for a device type in this thread; False for types without autocast."""
    return is_available(device_type) and torch.is_autocast_enabled(device_type)


def autocast_nesting() -> int:
    """Number of `torch.autocast` regions that this thread is in, all devices together."""
    # torch returns the number when it changes it. `map` calls both in C: an interrupt between would keep the change.
    _, nesting = map(operator.call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
    return nesting


@functools.cache
def takes(device_type: str, dtype: torch.dtype) -> bool:
    """Return True if a region for a device may have a dtype; warns or raises as `torch.autocast` does. Cached."""
    return torch.autocast(device_type, dtype)._enabled


@contextlib.contextmanager
def lowering_without_autocast() -> Iterator[None]:
    """Lower a graph so that no autocast acts, neither while it is traced nor when it or its backward runs.

    AOTAutograd excludes the Autocast keys at run time, forward and backward, only if some autocast was on at
    compile time: so one is, for a device that no tensor can be on.
    """
    with torch._C._DisableAutocast():
        torch.set_autocast_enabled(_INERT_DEVICE, True)
        try:
            yield
        finally:
            torch.set_autocast_enabled(_INERT_DEVICE, False)


def any_autocast_enabled() -> bool:
    """Return True if autocast is on for some device type in this thread; torch's own check omits MPS and MAIA."""
    return any(map(torch.is_autocast_enabled, torch._C._autocast_supported_devices()))


def autocast_states() -> dict[str, tuple[bool, torch.dtype]]:
    """Return, for each device type with autocast, whether it is on in this thread, and its dtype."""
    return {
        device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in torch._C._autocast_supported_devices()
    }


@contextlib.contextmanager
def autocast_disabled() -> Iterator[None]:
    """Turn autocast off on every device, without a region that a trace would record; a region entered inside acts."""
    enabled = [device for device in torch._C._autocast_supported_devices() if torch.is_autocast_enabled(device)]
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in enabled:
            torch.set_autocast_enabled(device, True)


ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
SET_GRAD_ENABLED = torch._C._set_grad_enabled
ENTER_INFERENCE = torch.autograd.grad_mode._enter_inference_mode
EXIT_INFERENCE = torch.autograd.grad_mode._exit_inference_mode
