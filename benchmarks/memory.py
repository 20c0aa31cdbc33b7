"""The most memory a process held, from a moment on."""

import ctypes
import gc
import sys
from pathlib import Path

import torch


def forget_peak(device: str) -> None:
    """Hand free memory back and start the peak anew, so that it is that of what follows, not of compilation."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: str) -> int:
    """Most bytes held since `forget_peak`: allocated on a CUDA device, else resident; 0 where unknown."""
    if device == "cuda" or sys.platform != "linux":
        return torch.cuda.max_memory_allocated() if device == "cuda" else 0
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["VmHWM"].removesuffix("kB"))
