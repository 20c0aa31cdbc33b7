"""Build the C++ kernels in `cpp/` with this machine's compiler at first use, keep them in a cache folder, call them.

They take addresses and sizes, so their build needs no headers or libraries of torch, but for `weights.cpp` and
`planned.cpp`. Why it isn't done by `torch.utils.cpp_extension` stands in docs/tried_and_dropped.md.
"""

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ampcompile.torch_private import storages
from ampcompile.torch_private.own_thread import made_once

log = logging.getLogger(__name__)

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
DTYPE_CODES |= {torch.int16: 3, torch.int64: 4, torch.int8: 5}
WIDE = 4  # added to the code of 16 bits for numbers that are rounded to them, and held as float32
SOURCES = Path(__file__).with_name("cpp")
# No flag lets the compiler assume finite numbers: these kernels must find infinities and NaNs.
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-ffp-contract=off", "-fopenmp", "-shared", "-fPIC"]
TORCH = Path(torch.__file__).parent
# Only these libraries need torch's headers, and the standard of C++ that they are written in.
WITH_TORCH = ["-std=c++20", "-w", f"-I{TORCH}/include", f"-L{TORCH}/lib", "-lc10"]
HEADERS = {"weights": WITH_TORCH, "planned": WITH_TORCH}


def available(source: str = "step") -> bool:
    """True if the C++ kernels can be used here; builds them at the first call (seconds, once per machine)."""
    return library(source) is not None


def cache_folder() -> Path:
    """The folder of the built library: `$AMPCOMPILE_CACHE_DIR`, else `ampcompile` in the user's cache folder."""
    if folder := os.environ.get("AMPCOMPILE_CACHE_DIR"):
        return Path(folder)
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if caches.startswith("~"):  # a user without a name and a home, as in containers
        return Path(tempfile.gettempdir(), f"ampcompile_{os.getuid()}")
    return Path(caches, "ampcompile")


@functools.cache
def library(source: str = "step") -> ctypes.CDLL | None:
    """The loaded library of `cpp/{source}.cpp`, or None if it can't be built; logs the reason."""
    if (compiler := find_compiler()) is None:
        return None
    try:
        return ctypes.CDLL(str(build(compiler, source)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning("the C++ kernels can't be built, torch's own CPU kernels are used instead: %s", reason)
        return None


@functools.cache
def find_compiler() -> str | None:
    """The path of a C++ compiler; None, and one warning for all libraries, if there is none."""
    names = [os.environ.get("CXX"), "g++", "clang++", "c++"]
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    if compiler is None:
        log.warning("no C++ compiler found ($CXX, g++, clang++, c++): torch's own CPU kernels are used instead")
    return compiler


def build(compiler: str, source: str = "step") -> Path:
    """Build the library of `cpp/{source}.cpp` with `compiler`, or take it from the cache; return its path."""
    version, flags = _version(compiler), [*FLAGS, *HEADERS.get(source, ())]
    torchs = torch.__version__ if source in HEADERS else ""
    parts = [source, torchs, version, *flags, *processor(), *(path.read_text() for path in sorted(SOURCES.iterdir()))]
    target = cache_folder() / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.so"
    if ours_alone(target.parent) and is_right(target):
        return target
    target = private_folder() / target.name
    with locked(target.parent), tempfile.TemporaryDirectory(dir=target.parent) as folder:
        if not is_right(target):  # another process may have built it meanwhile
            built = Path(folder, target.name)
            command = [compiler, str(SOURCES / f"{source}.cpp"), *flags, "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
            with built.open("ab") as file:
                file.write(hashlib.sha256(built.read_bytes()).digest())
            built.chmod(0o700)
            built.replace(target)  # atomic, for processes on a file system without locks
    return target


def _version(compiler: str) -> str:
    """Return what changes with the compiler's version; to ask the compiler takes longer than to load a library."""
    file = Path(compiler).resolve()
    return f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}"


def private_folder() -> Path:
    """The cache folder if only this user can write there, because its content is run; else a new temporary folder."""
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        if ours_alone(folder):
            return folder
        reason = f"others can write to {folder}; run chmod go-w on it, or name another by AMPCOMPILE_CACHE_DIR"
    except OSError as error:
        reason = str(error)
    log.warning("the C++ kernels are built for this process alone: %s", reason)
    return Path(tempfile.mkdtemp(prefix="ampcompile"))


def ours_alone(path: Path) -> bool:
    """True if a path exists, and only this user or root can have written it."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid in (0, os.getuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_right(library: Path) -> bool:
    """True if a library is ours and ends with the hash of the rest: loading half a library would crash the process."""
    content = library.read_bytes() if ours_alone(library) else b""
    return content[-32:] == hashlib.sha256(content[:-32]).digest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time into the context, if the folder's file system has locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def processor() -> list[str]:
    """The processor's properties that `-march=native` depends on; machines that differ must not share a library."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("flags", "Features", "model name", "CPU part")
    return [platform.machine(), *sorted({line for line in lines if line.startswith(wanted)})]


def call(name: str, tensors: int, *arrays: torch.Tensor | np.ndarray | int | None) -> None:
    """Call a function of the step's library on `tensors` many tensors, with torch's number of threads.

    `arrays` are passed by address, or are addresses; None is a null pointer. All must stay alive and contiguous.
    Raises MemoryError if there is too little for the kernel's own numbers; then it may have run in part.
    """
    places = [
        a if a is None or type(a) is int else a.data_ptr() if isinstance(a, torch.Tensor) else a.ctypes.data  # type: ignore[union-attr]
        for a in arrays
    ]
    if _kernel(name, len(arrays))(tensors, *places, torch.get_num_threads()):
        raise MemoryError(f"found too little memory for the kernel {name}, expected some beside its tensors: free some")


@functools.cache
def _kernel(name: str, arrays: int) -> Any:
    kernel = getattr(library(), name)
    kernel.argtypes, kernel.restype = [ctypes.c_int64, *[ctypes.c_void_p] * arrays, ctypes.c_int], ctypes.c_int
    return kernel


@functools.cache
def objects_library(source: str) -> Any:
    """The library of `cpp/{source}.cpp`, which reads Python's and torch's objects; None if it can't be built, or can't.

    Its functions hold Python's lock unless they let it go themselves, so for a Python without the lock it is None.
    """
    place = None if sysconfig.get_config_var("Py_GIL_DISABLED") else _place_of_address()
    if place is None or (built := library(source)) is None:
        return None
    loaded = ctypes.PyDLL(built._name)
    loaded.set_up(ctypes.c_int64(place), *(ctypes.c_void_p(id(kind)) for kind in (torch.Tensor, torch.nn.Parameter)))
    return loaded


@made_once
def _place_of_address() -> int | None:
    """Where, in the object of a tensor or a parameter, the address of its C++ object stands; None if it isn't known."""
    tensors = [torch.empty(0, dtype=torch.float32, device="cpu")]
    tensors.append(torch.nn.Parameter(tensors[0].clone()))

    def word(tensor: torch.Tensor, place: int) -> int:
        return ctypes.c_int64.from_address(id(tensor) + place).value

    places = range(16, torch.Tensor.__basicsize__, 8)
    fits = [place for place in places if all(word(t, place) == storages.tensor_address(t) for t in tensors)]
    typed = all(word(tensor, 8) == id(type(tensor)) for tensor in tensors)
    return fits[0] if fits and typed else None


def group_values(groups: Sequence[Any]) -> np.ndarray:
    """float64 [groups, settings], in the order of a group's fields; learning rates on a GPU are 0 here."""
    rows = [(0.0, *group[1:]) if isinstance(group.lr, torch.Tensor) else group for group in groups]
    return np.array(rows, dtype=np.float64)


def dtype_codes(tensors: Sequence[torch.Tensor | None]) -> np.ndarray:
    """int64 [tensors]: the code in `DTYPE_CODES` of each; 0 for None."""
    return np.array([0 if t is None else DTYPE_CODES[t.dtype] for t in tensors], dtype=np.int64)
