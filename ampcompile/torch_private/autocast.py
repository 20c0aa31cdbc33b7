"""Read autocast's state in this thread, keep autocast from acting, and track the regions that the thread is in.

A call of ours in a region `torch.autocast(device, enabled=False)` runs in float32. But torch keeps only the state that
results from all open regions, and two other regions result in the same state, though the user asked for float32 in
neither: one for another device, and one that restores a state saved outside of any region, as a checkpoint's in
backward does.

torch's own checkpoints ask a function of torch's for their state: that is wrapped. Checkpoints of other libraries are
autograd functions with `custom_fwd` and `custom_bwd`. These decorators have no hook, and are applied before we are
imported: only the caller's frame shows that they open a region, and for which call. Without a look there, backward
recomputes in float32 what forward computed in 16 bits.
"""

import contextlib
import functools
import operator
import sys
import threading
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

import torch

from . import dynamo, marks, patches

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


ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
SET_GRAD_ENABLED = torch._C._set_grad_enabled
ENTER_INFERENCE = torch.autograd.grad_mode._enter_inference_mode
EXIT_INFERENCE = torch.autograd.grad_mode._exit_inference_mode


class _Thread(threading.local):
    open: tuple[tuple[torch.autocast, bool, int], ...] = ()
    """The regions that the thread is in, innermost last. Beside each: True if the user asked for it, here or where the
    state that it restores was saved; and the sequence number that autograd's next node had at its entry."""
    may_have_more: bool = True
    """True if `open` may lack some: those entered before torch was patched, or all if torch can't be patched."""


class _OffWithoutRegion:
    """Replaces `enabled=False` in a state that was saved while autocast was off, but not by a region."""

    def __bool__(self) -> bool:
        return False


_thread, _OFF_WITHOUT_REGION, _MARK = _Thread(), _OffWithoutRegion(), "amp_asked_for_float32"
_FORWARD, _BACKWARD = (
    next((constant for constant in decorator.__code__.co_consts if isinstance(constant, CodeType)), None)
    for decorator in (torch.amp.custom_fwd, torch.amp.custom_bwd)
)


@contextlib.contextmanager
def state_restored() -> Iterator[None]:
    """Restore all devices' autocast states and the open regions, also when an error leaves regions of a graph open."""
    regions, states, nesting = _thread.open, autocast_states(), autocast_nesting()
    try:
        yield
    finally:
        _thread.open = regions
        for device, (enabled, dtype) in states.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        while autocast_nesting() > nesting:
            torch.autocast_decrement_nesting()


@contextlib.contextmanager
def autocast_disabled() -> Iterator[None]:
    """Turn autocast off on every device, without a region that a trace would record; a region entered inside acts."""
    with state_restored():
        for device in torch._C._autocast_supported_devices():
            torch.set_autocast_enabled(device, False)
        yield


def disabled_by_user(device_type: str) -> bool:
    """Return True if autocast is off for a device because the user asked for it, by a region that is open.

    The device of regions that were opened unobserved is unknown: they count unless autocast is on for some device.
    """
    if torch.is_autocast_enabled(device_type) or not (_thread.open or _thread.may_have_more):
        return False
    region = next((entry for entry in reversed(_thread.open) if entry[0].device == device_type), None)
    if region is not None:
        _, asked, node = region
    else:
        may_have_more, node = autocast_nesting() > len(_thread.open), 0
        _thread.may_have_more = may_have_more or not patches.is_installed(patches.REGIONS)
        asked = may_have_more and not any_autocast_enabled()
    if asked:
        _mark_functions(node)
    return asked


def _mark_functions(node: int) -> None:
    """Mark the autograd functions by `custom_fwd` that are called in a region: its request holds for their backward."""
    frame: Any = sys._getframe()
    while frame := frame.f_back:
        if frame.f_code is _FORWARD and node <= (ctx := frame.f_locals["args"][0])._sequence_nr():
            setattr(ctx, _MARK, True)


def watch_entries(original: Any) -> Any:
    """A wrap of `torch.autocast.__enter__`."""

    @functools.wraps(original)  # TorchScript reads the source
    def enter(self: Any) -> Any:
        asked, node = True, 0
        if not self._enabled:
            asked, self._enabled = self._enabled is not _OFF_WITHOUT_REGION, False
            node, opener = torch.autograd._get_sequence_nr(), sys._getframe(1)
            if opener.f_code is _FORWARD:
                node = opener.f_locals["args"][0]._sequence_nr()
            elif opener.f_code is _BACKWARD:
                asked = hasattr(opener.f_locals["args"][0], _MARK)
        entered = original(self)
        _thread.open = (*_thread.open, (self, asked, node))  # no interrupt can come in between: nothing is called
        return entered

    return _unseen_by_dynamo(enter, original)


def watch_exits(original: Any) -> Any:
    """A wrap of `torch.autocast.__exit__`."""

    @functools.wraps(original)
    def leave(self: torch.autocast, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any:
        before = _thread.open
        if before and before[-1][0] is self:
            _thread.open = before[:-1]
        else:
            _thread.open = tuple(entry for entry in before if entry[0] is not self)
        return original(self, exc_type, exc_val, exc_tb)

    return _unseen_by_dynamo(leave, original)


def carry_through_checkpoints(original: Any) -> Any:
    """A wrap of `torch.utils.checkpoint._get_autocast_kwargs`: the arguments of a checkpoint's regions in backward."""

    def get_autocast_kwargs(device_type: str = "cuda") -> Any:
        callback, saved = dynamo.set_frame_callback(None), original(device_type)
        try:
            _mark_states(device_type, saved)
        finally:
            dynamo.set_frame_callback(callback)
        return saved

    return _unseen_by_dynamo(get_autocast_kwargs, original)


def carry_through_open_checkpoints() -> None:
    """The same for the checkpoints that this thread is in, which were called before that function was wrapped."""
    frame: Any = sys._getframe()
    while frame := frame.f_back:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            run, ctx = getattr(frame.f_locals.get("gen"), "gi_frame", None), frame.f_locals.get("ctx")
            saved = vars(ctx) if ctx is not None else run.f_locals if run is not None else {}
            states = saved.get("device_autocast_kwargs"), saved.get("cpu_autocast_kwargs")
            _mark_states(getattr(ctx, "device_type", None) or saved.get("device_type", "cpu"), states)


def _mark_states(device_type: str, saved: Sequence[dict[str, Any] | None]) -> None:
    for device, kwargs in zip((device_type, "cpu"), saved, strict=True):
        if kwargs is not None and not kwargs["enabled"] and not disabled_by_user(device):
            kwargs["enabled"] = _OFF_WITHOUT_REGION


def _unseen_by_dynamo(function: Any, original: Any) -> Any:
    marks.pass_over(function)
    function._torchdynamo_inline = original  # for where it traces through classes that inherit from torch.autocast
    return function
