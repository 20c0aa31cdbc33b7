"""The machine, the versions and the commit of a measurement."""

import os
import platform
import re
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "triton", "transformers", "torchao")
UNITS = {"avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "bf16", "asimdhp"}
"""Instructions that multiply 16-bit numbers, as Linux names them."""


def about(device: str) -> dict[str, Any]:
    """Hardware, versions and thread counts."""
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"model name\s*: (.+)", cpu)
    found: dict[str, Any] = {
        "device": device,
        "processor": name[1] if name else platform.machine(),
        "cores": os.cpu_count() if not hasattr(os, "sched_getaffinity") else len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "low-precision instructions": sorted(UNITS & set(cpu.split())),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES if find_spec(name)},
        "commit": commit(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return found


def commit() -> str:
    """The commit measured, with a + if the package's files differ from it; empty outside a checkout."""
    head = _git("rev-parse", "--short", "HEAD")
    return head + "+" * bool(_git("status", "--porcelain", "--", "ampcompile", "passes", "kernels"))


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
        ).stdout.strip()
    except FileNotFoundError:
        return ""
