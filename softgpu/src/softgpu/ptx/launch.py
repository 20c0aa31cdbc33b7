"""Triton's kernels on this machine's memory: what stands in for Triton's driver of a GPU.

`driver()` is what `triton.runtime.driver.set_active` takes. Then `kernel[grid](...)` compiles for the GPU it names,
and the PTX that comes out runs here. A device of one's own gives it a subclass of `Launcher`, with another `memory`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from torch.multiprocessing.reductions import StorageWeakRef
from triton.backends.compiler import GPUTarget

from softgpu import ptxas_pattern
from softgpu.floats import u1
from softgpu.memory import EmulatorError, Global
from softgpu.ptx.parse import Kernel
from softgpu.threads import Launch

parsed = cache(Kernel)
loaded: dict[Kernel, None] = {}
"""Kernels with their machine code, in the order in which Triton loaded them"""


def packed(value: Any, kind: str) -> bytes:
    """An argument's bytes, of a type of Triton's."""
    if kind.startswith("*"):
        return np.int64(value.data_ptr() if hasattr(value, "data_ptr") else value or 0).tobytes()
    if kind[0] in "iu":
        size = max(int(kind[1:]) // 8, 1)
        return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    if kind in ("fp32", "f32", "fp64", "f64"):
        return (np.float32 if "32" in kind else np.float64)(value).tobytes()
    if kind in ("fp16", "bf16"):
        number = torch.tensor(value, dtype=torch.float16 if kind == "fp16" else torch.bfloat16)
        return number.view(torch.int16).numpy().tobytes()
    raise EmulatorError(f"no argument of type {kind} is known")


class Launcher:
    """What Triton calls to launch a kernel, on CPU tensors. A device of one's own overrides what it does otherwise."""

    def __init__(self, src: Any, metadata: Any) -> None:
        names = src.fn.arg_names
        self.kinds = [src.signature.get(name, src.signature.get(i, "constexpr")) for i, name in enumerate(names)]
        self.metadata = metadata

    def __call__(self, x: int, y: int, z: int, stream: Any, kernel: Kernel, *rest: Any) -> None:
        args = rest[len(rest) - len(self.kinds) :]
        given = [(value, kind) for value, kind in zip(args, self.kinds, strict=True) if kind != "constexpr"]
        if x * y * z:
            pointers = [value for value, kind in given if kind.startswith("*")]
            self.launch(kernel, (x, y, z), [packed(*each) for each in given], pointers)

    def launch(self, kernel: Kernel, grid: tuple[int, int, int], values: list[bytes], pointers: list[Any]) -> Launch:
        """Run it now; a device that records launches may call this again. `pointers` are tensors or addresses."""
        memory, scratch = self.memory(), []
        for size in (self.metadata.global_scratch_size, self.metadata.profile_scratch_size):
            scratch.append(np.zeros(size * int(np.prod(grid)) + 128, u1))
            memory.add([(scratch[-1].ctypes.data, scratch[-1].nbytes)] if size else [])
        values = [*values, *(np.int64(each.ctypes.data).tobytes() for each in scratch)]
        return self.run(kernel, grid, values, memory)

    def run(self, kernel: Kernel, grid: Any, values: list[bytes], memory: Global) -> Launch:
        return Launch(kernel, grid, values, memory, self.metadata.shared)

    def memory(self) -> Global:
        """What a launch may touch, kept for as long."""
        living = asked.living()
        memory = Global((each.data_ptr(), each.nbytes()) for each in living)
        memory.owners = living
        return memory


class Utils:
    """What Triton asks a driver's library."""

    def get_device_properties(self, device: Any) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

    def load_binary(self, name: str, binary: bytes, shared: int, device: Any) -> tuple[Any, Kernel, int, int, int]:
        """The caller's PTX, parsed, as a function; no spills, no registers."""
        ptx = sys._getframe(1).f_locals["self"].asm["ptx"]
        ptxas_pattern.check(ptx)  # of what was compiled before this was looked for, too
        kernel = parsed(ptx)
        kernel.binary = binary
        loaded[kernel] = None
        return None, kernel, 0, 0, 1024


def driver(launcher: type[Launcher] = Launcher, capability: int = 90, **more: Any) -> Any:
    """A driver for Triton whose kernels run here; `more` says what else is asked of it, or is answered otherwise.

    Triton keeps compiled kernels by the device: by default it is one that no real GPU has.
    """
    given = {
        "get_current_target": lambda: GPUTarget("cuda", capability, 32),
        "get_current_device": lambda: ("softgpu", capability),
        "get_current_stream": lambda device=None: 0,
        "get_active_torch_device": lambda: torch.device("cpu"),
        "set_current_device": lambda device: None,
        "launcher_cls": launcher,
        "utils": Utils(),
    }
    return SimpleNamespace(**given | more)


class Asked:
    """The CPU tensors whose address was asked for: no kernel of ours gets to any other memory."""

    def __init__(self) -> None:
        self.storages: dict[int, StorageWeakRef] = {}

    def address(self, tensor: torch.Tensor) -> int:
        """What stands in for `Tensor.data_ptr`."""
        found = torch._C.TensorBase.data_ptr(tensor)
        storage = torch._C.TensorBase.untyped_storage(tensor)  # Tensor's own tells that others may write from now on
        if storage.device.type == "cpu" and storage.nbytes():
            self.storages[storage.data_ptr()] = StorageWeakRef(storage)
        return found

    def living(self) -> list[torch.UntypedStorage]:
        self.storages = {at: each for at, each in self.storages.items() if not each.expired()}
        found = [torch.UntypedStorage._new_with_weak_ptr(each.cdata) for each in self.storages.values()]
        return [each for each in found if each is not None]


asked = Asked()


@contextmanager
def active(launcher: type[Launcher] = Launcher, capability: int = 90) -> Iterator[None]:
    """Have Triton launch on CPU tensors for a while."""
    before = triton.runtime.driver._active
    try:
        torch.Tensor.data_ptr = lambda self: asked.address(self)
        triton.runtime.driver.set_active(driver(launcher, capability))
        yield
    finally:
        triton.runtime.driver._active = before
        del torch.Tensor.data_ptr
