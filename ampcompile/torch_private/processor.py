"""The 16-bit types that this CPU multiplies in hardware, according to torch, oneDNN and the user's caps."""

import os
import platform
from functools import cache
from pathlib import Path

import torch

_NO_BFLOAT16 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"})
"""The values of `ONEDNN_MAX_CPU_ISA` with which oneDNN leaves units for bfloat16 unused."""

_ALL = frozenset({"", "ALL", "DEFAULT"})  # the values that cap nothing

_NO_AVX512 = frozenset({"DEFAULT", "NO AVX", "AVX2"})
"""torch's CPU capabilities without AVX-512, below which no x86-64 CPU has such units."""


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Return True if the CPU has units for products of a 16-bit floating type and may use them; else it emulates them.

    `ONEDNN_MAX_CPU_ISA` and `ATEN_CPU_CAPABILITY` may forbid them. On processors other than x86-64 torch's own check
    decides for bfloat16, and float16 units are assumed. Cached for the process.
    """
    if not _is_x86():
        return dtype == torch.float16 or _onednn_takes(dtype)
    if torch.backends.cpu.get_cpu_capability() in _NO_AVX512 or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16 and _cap() in _NO_BFLOAT16:
        return False
    units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return _onednn_takes(dtype) and (dtype == torch.float16 or units)


@cache
def multiplies_faster(dtype: torch.dtype) -> bool:
    """Return True if units for a 16-bit floating type multiply faster than those for float32.

    On x86-64 float16 needs AMX for it. Without AMX, Intel's cores since 2023 multiply bfloat16 at half of float32's
    rate (two of them: 165 GFLOP/s beside 317), while AMD's since Zen 4 are faster. Cached for the process.
    """
    if not _is_x86() or not multiplies(dtype):
        return multiplies(dtype)
    has_amx = torch.cpu._is_amx_tile_supported() and (_cap() in _ALL or "AMX" in _cap())
    if dtype == torch.float16:
        return has_amx and torch.cpu._is_amx_fp16_supported()
    return has_amx or not {"GenuineIntel", "avx512_fp16"} <= set(read_core().split())


@cache
def suits_mkl() -> bool:
    """Return True if torch multiplies float32 by MKL on an Intel CPU: on others MKL leaves the widest units unused."""
    return torch.backends.mkl.is_available() and "GenuineIntel" in read_core()


def hinders_fp8(device: torch.device) -> str:
    """Return why a GPU doesn't multiply 8-bit floats; empty if it has units for them, from Ada on."""
    if torch.version.hip is not None:
        return "on ROCm 8-bit floats are of other types"
    major, minor = torch.cuda.get_device_capability(device)
    units = (major, minor) >= (8, 9)
    return "" if units else f"this GPU, sm_{major}{minor}, has no units for it, sm_89 is the first"


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def _cap() -> str:
    """The newest instructions that the user lets oneDNN use; empty: all."""
    return (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").upper()


def read_core() -> str:
    """The lines of Linux about the first core, its maker, name and flags among them; empty elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return ""


def _onednn_takes(dtype: torch.dtype) -> bool:
    """Return True if oneDNN runs a type; for bfloat16 also where it only emulates it."""
    ops = torch.ops.mkldnn
    return bool(ops._is_mkldnn_fp16_supported() if dtype == torch.float16 else ops._is_mkldnn_bf16_supported())
