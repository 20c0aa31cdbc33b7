"""Machine code of our kernels as they are launched in use: in whole chunks, with wider accesses than in other tests."""

import importlib
from copy import deepcopy

import pytest
import torch

pytest.importorskip("triton")
import triton

from ampcompile.kernels import fp8, tables
from ampcompile.kernels.cast_many import cast_many_
from ampcompile.kernels.triton import cast_many
from ampcompile.kernels.unscale import unscale_
from softgpu.machine_code.compare import Both
from softgpu.machine_code.parse import Code, disassembled
from softgpu.ptx.parse import Kernel
from tests.compiling import same_bits
from tests.kernels.triton.running import on_a_gpu
from tests.kernels.triton.test_families import FAMILIES
from tests.scaler.cases import HOWS, MATRIX_SIZES, OPTIMIZERS, with_masters, with_quantized

pytestmark = pytest.mark.ci
LOW = (torch.float16, torch.bfloat16)


@pytest.fixture
def compared(monkeypatch):
    """The names of kernels of which both were run, and left the same bytes."""
    monkeypatch.setattr(Both, "compared", set())
    with on_a_gpu(launcher=Both):
        yield Both.compared


@pytest.mark.parametrize("family", FAMILIES)
def test_all_instructions_of_kernels_as_they_are_compiled_in_use_are_known(family, monkeypatch):
    compile_, kernels = triton.compile, []

    def noting(*args, **how):
        compiled = compile_(*args, **how)
        kernels.append(Kernel(compiled.asm["ptx"]))
        kernels[-1].binary = compiled.asm["cubin"]
        return compiled

    monkeypatch.setattr(triton, "compile", noting)
    importlib.import_module(f"tests.kernels.triton.compiled_{family}").check(90)
    for kernel, text in zip(kernels, disassembled(kernels), strict=True):
        assert Code(text, kernel).instructions


@pytest.mark.parametrize(("source", "captured"), [(torch.float64, False), (torch.float32, True)], ids=str)
def test_casts_and_quantizing(source, captured, monkeypatch, compared):
    monkeypatch.setattr(tables, "capturing", lambda device: captured)
    weights = [torch.randn(2 * cast_many.CHUNK + 5).to(source), torch.randn(cast_many.CHUNK + 1).to(source)[1:]]
    for target in LOW:
        copies = [torch.full_like(weight, torch.nan, dtype=target) for weight in weights]
        cast_many_(copies, weights)
        assert same_bits(copies, [weight.to(target) for weight in weights])
    matrices, kinds = [torch.randn(144, 80).to(t) for t in (torch.float32, *LOW) for _ in range(2)], [False, True] * 3
    ours, expected = ([fp8.buffer_like(*pair).fill_(0) for pair in zip(matrices, kinds, strict=True)] for _ in range(2))
    fp8.quantize_many_(ours, matrices)
    fp8.quantize_many_reference_(expected, matrices)
    assert same_bits([each.view(torch.uint8) for each in ours], [each.view(torch.uint8) for each in expected])
    assert compared >= {"amp_cast", "amp_magnitudes", "amp_quantize"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("adam", torch.bfloat16), pytest.param("sgd", torch.float16, marks=pytest.mark.slow)],
    ids=str,
)
def test_steps(name, dtype, monkeypatch, compared):
    """With copies, with each kind of masters, with quantized weights; and 16-bit gradients unscaled."""
    make, groups, take, _ = OPTIMIZERS[name]
    plain = make(groups, dtype, sizes=(tables.CHUNK + 5, 16))
    quantized = with_quantized(make(groups, dtype, sizes=MATRIX_SIZES))

    def step():
        for tensors in (plain, *(with_masters(plain, *how) for how in HOWS), quantized):
            take(deepcopy(tensors), torch.tensor(0.3), torch.zeros(()))
        unscale_(deepcopy(plain.grads), torch.tensor(0.3), torch.zeros(()), {})

    with monkeypatch.context() as patched:  # all are loaded first, and so disassembled together
        patched.setattr(Both, "launch", lambda *_: None)
        step()
    assert not compared
    step()
    assert compared >= {f"amp_{name}", "amp_unscale", "amp_quantize"}
