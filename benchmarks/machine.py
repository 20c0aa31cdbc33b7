"""The machine, the versions and the settings of a measurement."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "triton", "transformers", "numpy", "lightning-thunder", "liger-kernel", "ampcompile")


def about(device: str) -> dict[str, Any]:
    """Hardware, versions and thread counts."""
    found: dict[str, Any] = {
        "device": device,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "low-precision instructions": _instructions(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "compiler": _first_line(os.environ.get("CXX", "g++"), "--version"),
        "packages": {package: _version(package) for package in PACKAGES},
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return found


def commit() -> str:
    """The commit measured, with a + if files differ from it; empty outside a checkout."""
    head = _first_line("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    ours = ["ampcompile", "passes", "kernels", ":(glob)benchmarks/*.py"]
    changed = _first_line("git", "-C", str(ROOT), "status", "--porcelain", "--", *ours)
    return head + "+" * bool(changed)


def slug(about: dict[str, Any]) -> str:
    """A short file name for results of this kind of machine."""
    words = "".join(c if c.isalnum() else " " for c in about.get("gpu", about["processor"]).lower()).split()
    cores = "" if about["device"] == "cuda" else f"-{about['cores']}cores"
    return f"{about['device']}-{'-'.join(words[:4])}{cores}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _instructions() -> list[str]:
    """Those of the processor that multiply 16-bit numbers, as Linux names them."""
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return []
    return sorted({"avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "bf16", "asimdhp"} & set(words))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _first_line(command: str, *args: str) -> str:
    if shutil.which(command) is None:
        return ""
    printed = subprocess.run([command, *args], capture_output=True, text=True, check=False).stdout
    return (printed.splitlines() or [""])[0]
