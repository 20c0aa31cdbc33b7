"""Launches of this project's kernels on CPU tensors, by the emulator of PTX."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ampcompile.kernels.triton import launching
from tests.softgpu.ptx.launch import Launcher, active

CAPABILITIES = [90, *(pytest.param(each, marks=pytest.mark.ci) for each in (80, 100))]


@contextmanager
def on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: int = 90, launcher: type[Launcher] = Launcher
) -> Iterator[None]:
    """What was compiled for another GPU is forgotten."""
    monkeypatch.setattr(launching, "_compiled", {})
    with active(launcher, capability):
        yield
