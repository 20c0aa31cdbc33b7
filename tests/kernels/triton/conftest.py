"""Kernels on CPU tensors: as Triton compiles them for a GPU, their PTX run by an emulator."""

import pytest

from tests.kernels.triton.running import CAPABILITIES, on_a_gpu


@pytest.fixture(params=CAPABILITIES, ids="sm_{}".format)
def emulated(request, monkeypatch):
    """Triton compiles for this GPU, and launches on CPU tensors; the number of its generation."""
    with on_a_gpu(monkeypatch, request.param):
        yield request.param
