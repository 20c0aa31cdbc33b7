"""The device's library: built once for each Python, torch and text of its sources, loaded before torch is imported."""

import ctypes
import hashlib
import os
import runpy
import subprocess
import sysconfig
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).with_name("cpp")
BUILT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "softgpu"


def torch_folder() -> Path:
    spec = PathFinder.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def torch_version() -> tuple[str, str | None]:
    """The installed torch's version, and the CUDA that it was built for; torch isn't imported for it."""
    found = runpy.run_path(str(torch_folder() / "version.py"))
    return found["__version__"], found["cuda"]


def build() -> Path:
    """The library's file; compiling it takes half a minute, once."""
    texts = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    names = f"{torch_version()[0]} {sysconfig.get_config_var('SOABI')}"
    key = hashlib.sha256(b"".join([names.encode(), *texts])).hexdigest()[:16]
    built = BUILT / f"{key}.so"
    if not built.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        torch, new = torch_folder(), built.with_suffix(f".{os.getpid()}")
        places = (f"{torch}/include", f"{torch}/include/torch/csrc/api/include", sysconfig.get_path("include"))
        include = [f"-I{place}" for place in places]
        command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", *include, SOURCES / "device.cpp", "-o", new]
        subprocess.run([*command, f"-L{torch}/lib", "-lc10", "-ltorch_cpu"], check=True)
        new.replace(built)
    return built


@cache
def soft() -> Any:
    """The library, as a module: its functions stand at the end of `cpp/device.cpp`."""
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    spec: Any = spec_from_file_location("softgpu", build())
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
