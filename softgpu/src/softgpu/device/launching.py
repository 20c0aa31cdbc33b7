"""Triton's kernels on the device: what they touch is noted on the current stream, and captures repeat them."""

from typing import Any

import torch

from softgpu.memory import Global
from softgpu.ptx import launch

from .library import soft
from .torch_c import CAPABILITY


class Launcher(launch.Launcher):
    """What Triton calls to launch a kernel."""

    def memory(self) -> Global:
        """All that lives; races are left to the tests of kernels, as looking for them takes half of the time."""
        return Global([], soft().blocks, races=False)

    def launch(self, kernel: Any, grid: tuple[int, int, int], values: list[bytes], pointers: list[Any]) -> Any:
        for each in pointers:
            if isinstance(each, torch.Tensor) and each.device.type != "cuda" and not each.is_pinned():
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        device, name, sizes = soft().device(), kernel.name, dict(soft().blocks())
        number = soft().launch(device, name)
        found = super().launch(kernel, grid, values, pointers)
        soft().record(device, name, lambda: super(Launcher, self).launch(kernel, grid, values, []))
        read, written = found.memory.read, found.memory.written
        soft().touch(device, number, name, [(at, sizes[at], at in written) for at in read | written if at in sizes])
        return found


def driver() -> Any:
    """The driver for `triton.runtime.driver.set_active`."""
    return launch.driver(
        Launcher,
        capability=10 * CAPABILITY[0] + CAPABILITY[1],
        get_current_device=soft().device,
        set_current_device=soft().exchange_device,
        get_current_stream=lambda device=None: soft().stream(soft().device() if device is None else device),
        get_active_torch_device=lambda: torch.device("cuda", soft().device()),
        get_device_interface=lambda: torch.cuda,
    )
