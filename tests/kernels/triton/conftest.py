"""Kernels on CPU tensors: as Triton compiles them for a GPU, their PTX run by an emulator."""

import pytest

from tests.kernels.triton import OTHERS


@pytest.fixture(params=[90, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)], ids=str)
def emulated(request, monkeypatch):
    """Triton compiles for this generation of GPUs, whose number is returned, and launches on CPU tensors.

    Machine code is that of sm_90: it is run beside the PTX, and has to leave the same bytes.
    """
    from softgpu.machine_code.compare import Both
    from softgpu.ptx.launch import Launcher
    from tests.kernels.triton.running import on_a_gpu  # which imports Triton

    both = request.param == "machine code"
    capability = 90 if both else request.param
    with on_a_gpu(monkeypatch, capability, Both if both else Launcher):
        yield capability
