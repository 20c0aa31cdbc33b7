"""An absent GPU: call `load` before torch is imported, `describe` after it, in a process of its own."""

import ctypes
import importlib.util
import subprocess
import types
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("absent_cuda.cpp")
_kernels: Any = None  # torch forgets those of a library that nobody holds
CAPABILITY = (9, 0)
MEMORY = 141 << 30
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=MEMORY,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    gcnArchName="",
    uuid="0",
    pci_bus_id=0,
)
"""CUDA's properties of an H200, as far as Inductor reads them."""


def build(folder: Path) -> Path:
    """Compile the device's library into a folder; takes a few seconds."""
    torch = _torch()
    built = folder / "absent_cuda.so"
    include = torch / "include"
    command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{include}"]
    command += [f"-I{include}/torch/csrc/api/include", str(SOURCE), "-o", str(built)]
    subprocess.run([*command, f"-L{torch}/lib", "-lc10", "-ltorch_cpu"], check=True)
    return built


def load(built: Path) -> None:
    """Register the device, before torch is imported, which looks up hooks once."""
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(built))


def describe() -> None:
    """Make torch, Triton and ampcompile take the device for an H200, and Inductor lower for it without its caches."""
    import torch
    import torch.cuda.amp.common
    import torch.utils._triton
    import triton
    from torch._dynamo import device_interface
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    def properties(*_: object) -> types.SimpleNamespace:
        return PROPERTIES

    def yes(*_: object, **__: object) -> bool:
        return True

    cuda: Any = device_interface.CudaInterface
    interfaces: list[Any] = [torch.cuda, cuda, cuda.Worker]
    for interface in interfaces:
        interface.get_device_properties = properties
        interface.current_device = lambda *_: 0
    for interface in interfaces[:2]:
        interface.is_bf16_supported, interface.device_count = yes, lambda *_: 1
    torch.cuda.get_device_capability = lambda *_: CAPABILITY
    cuda.get_compute_capability = lambda *_: 10 * CAPABILITY[0] + CAPABILITY[1]
    cuda.is_available = yes
    torch.utils._triton.has_triton = yes  # type: ignore[assignment]
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False

    def never(*_: object) -> None:
        raise RuntimeError("nothing runs on this device")

    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    triton.runtime.driver.set_active(driver)
    triton_helpers.set_driver_to_gpu = lambda: None  # kernels' code would activate the driver of a real GPU
    global _kernels  # where a device has no kernel for it, torch takes it apart before anything else does
    _kernels = torch.library.Library("aten", "IMPL")
    _kernels.impl("silu_backward", never, "CUDA")
    inductor, functorch = torch._inductor.config, torch._functorch.config
    inductor.joint_graph_constant_folding = False  # folding runs ops for real
    inductor.shape_padding = False  # padding measures on the device; no case has a dimension that needs much of it
    inductor.compile_threads = 1
    inductor.fx_graph_cache = False
    functorch.enable_autograd_cache = False
    functorch.force_non_lazy_backward_lowering = True


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
