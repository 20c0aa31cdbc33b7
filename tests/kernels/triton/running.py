"""Launches of this project's kernels on CPU tensors, by the emulator of PTX."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ampcompile.kernels import tables
from ampcompile.kernels.triton import cast_many, launching, loss_scaling, step
from softgpu.ptx.launch import Launcher, active


@contextmanager
def on_a_gpu(capability: int = 90, launcher: type[Launcher] = Launcher, chunk: int = 0) -> Iterator[None]:
    """Public functions run Triton's kernels, in chunks of so many elements if that is said.

    What was compiled for another GPU is forgotten.
    """
    changed: list[tuple[Any, str, Any]] = [
        (launching, "compiled_forms", {}),
        (tables, "by_triton", lambda device: True),
    ]
    if chunk:
        changed += [(module, "CHUNK", chunk) for module in (tables, cast_many)]
        changed += [(module, "BLOCK", chunk // 2) for module in (step, loss_scaling, cast_many)]
    with pytest.MonkeyPatch.context() as patch, active(launcher, capability):
        for change in changed:
            patch.setattr(*change)
        yield
