"""Ops are defined without a search through all modules that are loaded, and torch still knows where."""

import inspect
import subprocess
import sys
from types import ModuleType

import ampcompile.kernels
from ampcompile.kernels import native
from ampcompile.torch_private.sources import tell_sources

SCRIPT = """
import inspect
import torch._inductor.compile_fx
from torch._library.simple_registry import singleton
looked, ismodule = [], inspect.ismodule
inspect.ismodule = lambda value: looked.append(value) or ismodule(value)
import ampcompile.backend
ops = [singleton.find(f"ampcompile::{name}") for name in ("packed_linear", "watched")]
print(len(looked), *(op.fake_impl.kernel.source for op in ops))
"""


def test_importing_the_backend_searches_no_modules_and_ops_know_their_files() -> None:
    run = subprocess.run([sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=True)
    looks, *sources = run.stdout.split()
    assert int(looks) < 1000  # one search looks at some thousand modules
    files = ["/".join(source.partition(":")[0].split("/")[-2:]) for source in sources]
    assert files == ["kernels/packed_linear.py", "passes/watch_op.py"]


def test_what_is_told_is_what_a_search_finds() -> None:
    told: dict[str, ModuleType | None] = {}
    for _ in range(2):
        inspect.modulesbyfile.pop(native.__file__, None)
        inspect._filesbymodname.clear()  # type: ignore[attr-defined]  # of an earlier search
        if told:
            tell_sources("ampcompile.kernels", ampcompile.kernels.__path__)
        told[f"search {len(told)}"] = inspect.getmodule(native.available.__code__)
    assert [*told.values()] == [native, native]
