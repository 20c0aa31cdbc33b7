"""Launches of this project's kernels on CPU tensors, by the emulator of PTX."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ampcompile.kernels.triton import launching
from softgpu.ptx.launch import Launcher, active


@contextmanager
def on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: int = 90, launcher: type[Launcher] = Launcher
) -> Iterator[None]:
    """What was compiled for another GPU is forgotten."""
    monkeypatch.setattr(launching, "_compiled", {})
    with active(launcher, capability):
        yield
