"""The C++ kernels in `cpp/`: built by this machine's compiler at first use, kept in a cache folder.

Not by `torch.utils.cpp_extension`: that needs ninja, which torch doesn't bring, and keeps what it built in a folder
that knows no processor, so that machines that share a home would run what `-march=native` made for another. These
kernels take addresses and sizes: nothing of torch has to be compiled or linked.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

log = logging.getLogger(__name__)

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
SOURCES = Path(__file__).with_name("cpp")
# Nothing that lets the compiler assume finite numbers: looking for the others is what these kernels are for.
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-ffp-contract=off", "-fopenmp", "-shared", "-fPIC"]


def available() -> bool:
    """Whether the C++ kernels can be used here; builds them at the first call (seconds, once per machine)."""
    return library() is not None


def cache_folder() -> Path:
    """Where the built library is kept: `$AMPCOMPILE_CACHE_DIR`, else `ampcompile` in the user's cache folder."""
    if folder := os.environ.get("AMPCOMPILE_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ampcompile"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None where it can't be built; says why in the log."""
    compilers = [os.environ.get("CXX"), "g++", "clang++", "c++"]
    compiler = next((path for name in compilers if name and (path := shutil.which(name))), None)
    if compiler is None:
        log.warning("no C++ compiler found ($CXX, g++, clang++, c++): torch's own CPU kernels are used instead")
        return None
    try:
        return ctypes.CDLL(str(build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning("the C++ kernels can't be built, torch's own CPU kernels are used instead: %s", reason)
        return None


def build(compiler: str) -> Path:
    """The shared library built by `compiler` from `cpp/`, from the cache if it is there."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    parts = [version, *FLAGS, *processor(), *(path.read_text() for path in sorted(SOURCES.iterdir()))]
    target = cache_folder() / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.so"
    if _is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        building = tempfile.TemporaryDirectory(dir=target.parent)
    except OSError:  # a folder that can't be made or written to: build once per process
        target = Path(tempfile.mkdtemp(prefix="ampcompile"), target.name)
        building = tempfile.TemporaryDirectory(dir=target.parent)
    with building as folder:
        built = Path(folder, target.name)
        command = [compiler, *FLAGS, str(SOURCES / "step.cpp"), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        with built.open("ab") as file:
            file.write(hashlib.sha256(built.read_bytes()).digest())
        built.replace(target)  # in one piece, whoever else is building it
    return target


def _is_whole(library: Path) -> bool:
    """Whether a library is there and ends with the hash of the rest: half of one would crash whoever loads it."""
    content = library.read_bytes() if library.exists() else b""
    return content[-32:] == hashlib.sha256(content[:-32]).digest()


def processor() -> list[str]:
    """What `-march=native` depends on: machines that differ in it must not share a library."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("flags", "Features", "model name", "CPU part")
    return [platform.machine(), platform.processor(), *sorted({line for line in lines if line.startswith(wanted)})]


def call(name: str, tensors: int, *arrays: torch.Tensor | np.ndarray | None) -> None:
    """Call a function of the library on that many tensors, with torch's number of threads.

    `arrays` are passed by address, None as a null pointer. All must stay alive and contiguous.
    """
    found = library()
    assert found is not None
    function = getattr(found, name)
    function.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * len(arrays), ctypes.c_int]
    function.restype = None
    addresses = [a if a is None else a.data_ptr() if isinstance(a, torch.Tensor) else a.ctypes.data for a in arrays]
    function(tensors, *addresses, torch.get_num_threads())


def group_values(groups: Sequence[Any]) -> np.ndarray:
    """float64 [groups, settings], in the order of a group's fields; learning rates on a GPU are 0 here."""
    others = attrgetter(*(each.name for each in fields(groups[0]) if each.name != "lr"))
    rows = [(0.0 if isinstance(group.lr, torch.Tensor) else group.lr, *others(group)) for group in groups]
    return np.array(rows, dtype=np.float64)


def addresses(*rows: Sequence[torch.Tensor | None]) -> np.ndarray:
    """int64 [rows, tensors]: where each tensor lies; 0 for None."""
    return np.array([[0 if t is None else t.data_ptr() for t in row] for row in rows], dtype=np.int64)


def sizes(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """int64 [tensors]: number of elements of each."""
    return np.array([t.numel() for t in tensors], dtype=np.int64)


def dtype_codes(tensors: Sequence[torch.Tensor | None]) -> np.ndarray:
    """int64 [tensors]: the code in `DTYPE_CODES` of each; 0 for None."""
    return np.array([0 if t is None else DTYPE_CODES[t.dtype] for t in tensors], dtype=np.int64)
