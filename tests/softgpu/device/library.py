"""The device's library: built once for each torch and each text of its sources, loaded before torch is imported."""

import ctypes
import hashlib
import os
import runpy
import subprocess
from collections.abc import Callable
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).with_name("cpp")
BUILT = Path(__file__).parents[3] / ".inductor" / "softgpu"
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int64)


def torch_folder() -> Path:
    spec = PathFinder.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def torch_version() -> tuple[str, str | None]:
    """The installed torch's version, and the CUDA that it was built for; torch isn't imported for it."""
    found = runpy.run_path(str(torch_folder() / "version.py"))
    return found["__version__"], found["cuda"]


def build() -> Path:
    """The library's file; compiling it takes ten seconds, once."""
    texts = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    key = hashlib.sha256(b"".join([torch_version()[0].encode(), *texts])).hexdigest()[:16]
    built = BUILT / f"{key}.so"
    if not built.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        torch, new = torch_folder(), built.with_suffix(f".{os.getpid()}")
        include = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
        command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", *include, SOURCES / "device.cpp", "-o", new]
        subprocess.run([*command, f"-L{torch}/lib", "-lc10", "-ltorch_cpu"], check=True)
        new.replace(built)
    return built


@cache
def soft() -> Any:
    """The library: `soft().soft_...` are the functions at the end of `cpp/device.cpp`."""
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(build()))
    number, text, whole = ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p
    for name, result, *arguments in (
        ("failure", text),
        ("take_over", number, ctypes.c_int),
        ("blocks", number, whole, whole, number),
        ("allocated", number, ctypes.c_int, ctypes.c_int),
        ("pool", None, number),
        ("release_pool", None, number),
        ("take_away", None, whole, text),
        ("device", number, number),
        ("stream", number, number),
        ("set_stream", None, number, number),
        ("new_stream", number, number),
        ("synchronize", number, number),
        ("launch", number, number, text),
        ("touch", number, number, number, text, number, whole, whole, whole),
        ("record", ctypes.c_int, number, text, CALLBACK, number),
        ("begin", number, number),
        ("end", number),
        ("replay", number, number),
        ("forget", None, number),
        ("notes", number, whole, number),
    ):
        function = getattr(library, f"soft_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def check(result: int) -> int:
    """What a function returned; -1 says that it failed."""
    if result == -1:
        raise RuntimeError(soft().soft_failure().decode())
    return result


def blocks() -> list[tuple[int, int]]:
    """Address and size of all memory of the device, and of what is pinned."""
    room = 1024
    while True:
        where, size = (ctypes.c_uint64 * room)(), (ctypes.c_uint64 * room)()
        found = soft().soft_blocks(where, size, room)
        if found <= room:
            return list(zip(where[:found], size[:found], strict=True))
        room = 2 * found


def names_of() -> list[str]:
    """The ops that wrote and the kernels that were launched since `soft_note(1)`."""
    soft().soft_note(0)
    text = ctypes.create_string_buffer(soft().soft_notes(None, 0) + 1)
    soft().soft_notes(text, len(text))
    return text.value.decode().splitlines()


class Repeated:
    """Calls of Python's that captures record. What one of them raises is raised after the replay."""

    def __init__(self) -> None:
        self.calls: dict[int, Callable[[], object]] = {}
        self.error: BaseException | None = None
        self.callback = CALLBACK(self._run)

    def _run(self, number: int) -> None:
        if self.error is None:
            try:
                self.calls[number]()
            except BaseException as error:
                self.error = error

    def record(self, device: int, name: str, call: Callable[[], object]) -> None:
        """Have the capture that goes on repeat a call, if one does."""
        if soft().soft_record(device, name.encode(), self.callback, len(self.calls)):
            self.calls[len(self.calls)] = call

    def replay(self, graph: int) -> None:
        """Launch a graph."""
        result = soft().soft_replay(graph)
        error, self.error = self.error, None
        if error is not None:
            raise error
        check(result)


repeated = Repeated()
