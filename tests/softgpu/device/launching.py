"""Triton's kernels on the device: what they touch is noted on the current stream, and captures repeat them."""

import ctypes
from typing import Any

import torch

from tests.softgpu.memory import Global
from tests.softgpu.ptx import launch

from .library import blocks, check, repeated, soft
from .torch_c import CAPABILITY, current_device


class Launcher(launch.Launcher):
    """What Triton calls to launch a kernel."""

    def memory(self, pointers: list[Any]) -> Global:
        """All that lives; races are left to the tests of kernels, as looking for them takes half of the time."""
        return Global([], blocks, races=False)

    def launch(self, kernel: Any, grid: tuple[int, int, int], values: list[bytes], pointers: list[Any]) -> Any:
        for each in pointers:
            if isinstance(each, torch.Tensor) and each.device.type != "cuda" and not each.is_pinned():
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        device, name, sizes = current_device(), kernel.name.encode(), dict(blocks())
        number = soft().soft_launch(device, name)
        found = super().launch(kernel, grid, values, pointers)
        repeated.record(device, kernel.name, lambda: super(Launcher, self).launch(kernel, grid, values, []))
        read, written = found.memory.read, found.memory.written
        touched = [(at, sizes[at], at in written) for at in read | written if at in sizes]
        kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint8)
        columns = [(kind * len(touched))(*(row[i] for row in touched)) for i, kind in enumerate(kinds)]
        check(soft().soft_touch(device, number, name, len(touched), *columns))
        return found


def driver() -> Any:
    """The driver for `triton.runtime.driver.set_active`."""
    return launch.driver(
        Launcher,
        capability=10 * CAPABILITY[0] + CAPABILITY[1],
        get_current_device=current_device,
        set_current_device=lambda device: check(soft().soft_device(device)),
        get_current_stream=lambda device=None: soft().soft_stream(current_device() if device is None else device),
        get_active_torch_device=lambda: torch.device("cuda", current_device()),
        get_device_interface=lambda: torch.cuda,
    )
