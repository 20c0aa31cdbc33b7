"""Our part of the key of Inductor's caches: a hash over all files that may affect compiled code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from ampcompile.passes.analysis.wide_products import WideProducts

# These rooms don't affect compiled graphs: they use the compiler, or work around a graph. Of `weights`, `spec` does.
_WITHOUT = frozenset({"command_line", "insight", "scaler", "weights"})


def cache_key(wide: WideProducts) -> str:
    """The key of what compiled code depends on besides the graph: the package, the CPU's vectors and units.

    Inductor's own keys leave out the CPU's vectors: code that it wrote for AVX-512 is wrong when compiled for AVX2.
    """
    return f"{source_key()} {torch.backends.cpu.get_cpu_capability()} {wide}"


@cache
def source_key() -> str:
    """The key of the installed package, computed once per process, when the first graph is lowered."""
    return key_of(covered_files())


def covered_files() -> list[Path]:
    """The package's files that the key covers, passes, kernels and their C++ included."""
    rooms = [find_spec(f"ampcompile.{name}") for name in ("passes", "kernels")]  # elsewhere in an editable install
    folders = [Path(folder) for room in rooms if room is not None for folder in room.submodule_search_locations or ()]
    own = Path(__file__).parents[1]
    folders += [folder for folder in own.iterdir() if folder.is_dir() and folder.name not in _WITHOUT]
    files = {*own.glob("*.py"), own / "weights" / "spec.py"}
    return sorted(files.union(*map(_sources, folders)))


def key_of(files: Iterable[Path]) -> str:
    """A hash over the names and texts of files."""
    hashed = hashlib.sha256()
    for path in sorted(files):
        text = path.read_bytes()
        hashed.update(f"{path.parent.name}/{path.name} {len(text)} ".encode() + text)
    return hashed.hexdigest()


def _sources(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h"))
