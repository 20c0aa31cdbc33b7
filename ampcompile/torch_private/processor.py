"""The 16-bit types that this CPU multiplies in hardware, according to torch, oneDNN and the user's caps."""

import os
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

_NO_BFLOAT16 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"})
"""The values of `ONEDNN_MAX_CPU_ISA` with which oneDNN leaves units for bfloat16 unused."""

_ALL = frozenset({"", "ALL", "DEFAULT"})  # the values that cap nothing

_NO_AVX512 = frozenset({"DEFAULT", "NO AVX", "AVX2"})
"""torch's CPU capabilities without AVX-512, below which no x86-64 CPU has such units."""


class Cpu(NamedTuple):
    """What Linux, torch and oneDNN say of a CPU, and `cap`, the newest instructions that the user lets oneDNN use."""

    x86: bool
    vectors: str  # torch's name of them
    takes: frozenset[torch.dtype]  # 16-bit types that oneDNN runs; bfloat16 also where it only emulates it
    units: frozenset[str]  # of "avx512_bf16", "amx" and "amx_fp16"
    core: str = ""
    cap: str = ""
    onednn: bool = True
    mkl: bool = False

    def multiplies(self, dtype: torch.dtype) -> bool:
        """True if it has units for products of a 16-bit floating type and may use them; else it emulates them.

        `ONEDNN_MAX_CPU_ISA` and `ATEN_CPU_CAPABILITY` may forbid them. On processors other than x86-64 torch's own
        check decides for bfloat16, and float16 units are assumed.
        """
        if not self.x86:
            return dtype == torch.float16 or dtype in self.takes
        if self.vectors in _NO_AVX512 or not self.onednn or (dtype == torch.bfloat16 and self.cap in _NO_BFLOAT16):
            return False
        return dtype in self.takes and (dtype == torch.float16 or bool(self.units & {"avx512_bf16", "amx"}))

    def multiplies_faster(self, dtype: torch.dtype) -> bool:
        """True if these units are faster than those for float32.

        On x86-64 float16 needs AMX for it. Without AMX, Intel's cores since 2023 multiply bfloat16 at half of float32's
        rate (two of them: 165 GFLOP/s beside 317), while AMD's since Zen 4 are faster.
        """
        if not self.x86 or not self.multiplies(dtype):
            return self.multiplies(dtype)
        has_amx = "amx" in self.units and (self.cap in _ALL or "AMX" in self.cap)
        if dtype == torch.float16:
            return has_amx and "amx_fp16" in self.units
        return has_amx or not {"GenuineIntel", "avx512_fp16"} <= set(self.core.split())

    def suits_mkl(self) -> bool:
        """True if torch multiplies float32 by MKL on an Intel CPU: on others MKL leaves the widest units unused."""
        return self.mkl and "GenuineIntel" in self.core


def this_cpu() -> Cpu:
    """As it is now."""
    asked = {"avx512_bf16": torch.cpu._is_avx512_bf16_supported, "amx": torch.cpu._is_amx_tile_supported}
    asked["amx_fp16"] = torch.cpu._is_amx_fp16_supported
    takes = {}
    if torch.backends.mkldnn.is_available():
        ops = torch.ops.mkldnn
        takes = {torch.float16: ops._is_mkldnn_fp16_supported, torch.bfloat16: ops._is_mkldnn_bf16_supported}
    return Cpu(
        platform.machine() in ("x86_64", "AMD64"),
        torch.backends.cpu.get_cpu_capability(),
        frozenset(dtype for dtype, ask in takes.items() if ask()),
        frozenset(name for name, ask in asked.items() if ask()),
        read_core(),
        (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").upper(),
        torch.backends.mkldnn.is_available(),
        torch.backends.mkl.is_available(),
    )


# Of the CPU as it is when they are first asked.
multiplies = cache(lambda dtype: this_cpu().multiplies(dtype))
multiplies_faster = cache(lambda dtype: this_cpu().multiplies_faster(dtype))
suits_mkl = cache(lambda: this_cpu().suits_mkl())


def hinders_fp8(device: torch.device) -> str:
    """Return why a GPU doesn't multiply 8-bit floats; empty if it has units for them, from Ada on."""
    return why_no_fp8(*torch.cuda.get_device_capability(device), rocm=torch.version.hip is not None)


def why_no_fp8(major: int, minor: int, rocm: bool) -> str:
    """The same of a GPU by its compute capability."""
    if rocm:
        return "on ROCm 8-bit floats are of other types"
    units = (major, minor) >= (8, 9)
    return "" if units else f"this GPU, sm_{major}{minor}, has no units for it, sm_89 is the first"


def read_core() -> str:
    """The lines of Linux about the first core, its maker, name and flags among them; empty elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return ""
