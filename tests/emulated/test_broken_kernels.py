"""Kernels that are broken on purpose fail, each where it is broken; right ones beside them pass."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from ampcompile.kernels import fp8
from ampcompile.kernels.triton import quantize_many
from ampcompile.kernels.triton.quantize_many import fitted, matrix_at, read_tile, sizes_of, tile_at, write_scales
from softgpu import ptxas_pattern
from softgpu.machine_code.compare import Both, Differs
from softgpu.machine_code.parse import BIN
from softgpu.memory import EmulatorError
from softgpu.ptx import launch
from softgpu.threads import Race
from tests.compiling import same_bits
from tests.kernels.triton.running import on_a_gpu

# Triton 3.9's, of kernels that don't say whether sums are fused; the package's do.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")
LOST = Path(__file__).with_name("lost.ptx").read_text()


@triton.jit
def scale(x, out, n, MASKED: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x + at, mask=at < n) if MASKED else tl.load(x + at)
    tl.store(out + at, 2 * numbers, mask=at < n + LAST)


@triton.jit
def to_bfloat16(x, out, TRUNCATE: tl.constexpr, BLOCK: tl.constexpr):
    numbers = tl.load(x + tl.arange(0, BLOCK))
    if TRUNCATE:
        low = (numbers.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        low = numbers.to(tl.bfloat16)
    tl.store(out + tl.arange(0, BLOCK), low)


@triton.jit
def total(x, out, BLOCK: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, BLOCK))))


@pytest.mark.parametrize(("masked", "last"), [(True, 0), (False, 0), (True, 1)])
def test_a_missing_mask_and_an_address_one_past_the_end(masked, last):
    x = torch.randn(1000)
    out = torch.empty_like(x)
    with on_a_gpu():
        if masked and not last:
            scale[(2,)](x, out, 1000, masked, last, 512)
            return torch.testing.assert_close(out, 2 * x)
        with pytest.raises(EmulatorError) as error:
            scale[(2,)](x, out, 1000, masked, last, 512)
    found = re.search(
        r"test_broken_kernels.py:\d+, line \d+: .*(ld|st)\.global.* program 1 thread \d+: (.*)", str(error.value)
    )
    assert found and found[1] == ("st" if last else "ld")
    assert "from the beginning of the nearest block, which has 4000" in found[2]
    assert not last or "4000 bytes from" in found[2]


@pytest.mark.parametrize("truncate", [False, True])
def test_truncation_instead_of_rounding(truncate):
    x = torch.randn(1024)
    out = torch.empty(1024, dtype=torch.bfloat16)
    with on_a_gpu():
        to_bfloat16[(1,)](x, out, truncate, 1024)
    cut_off = (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    assert same_bits(out, cut_off if truncate else x.bfloat16()) and not same_bits(cut_off, x.bfloat16())


@pytest.mark.parametrize("barriers", [True, False])
def test_a_missing_barrier_between_a_shared_write_and_a_read(barriers, monkeypatch):
    x, out = torch.arange(1024.0), torch.empty(1)
    parse = launch.parsed
    if not barriers:
        monkeypatch.setattr(launch, "parsed", lambda ptx: parse(re.sub(r"(bar|barrier)(\.cta)?\.sync\s+0;", "", ptx)))
    with on_a_gpu():
        if barriers:
            total[(1,)](x, out, 1024)
            assert out.item() == x.sum()
        else:
            with pytest.raises(Race, match=r"ld.shared.*read after a write by warp . of its program"):
                total[(1,)](x, out, 1024)


@triton.jit
def amp_quantize(words, tiles, FROM: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, BY_ROWS: tl.constexpr):
    """As it was when an H200 lost half of the transposed numbers: they leave the branch in registers.

    A deliberate copy: all but the branch is as in `quantize_many.amp_quantize`.
    """
    row, r, c, inside = tile_at(words, tiles, TILE, COLUMNS)
    height, width = sizes_of(row)
    plain = matrix_at(row, 5) + r[:, None] * width + c[None, :]
    other = matrix_at(row, 6) + c[:, None] * height + r[None, :]
    exponent = write_scales(row, 0, 1, True)
    if tl.load(tl.load(row + 8).to(tl.pointer_type(tl.int32)) + 1) == (254 - exponent) << 23:
        numbers = tl.load(plain, mask=inside)
    else:
        numbers = fitted(read_tile(row, r, c, inside, FROM), (exponent << 23).to(tl.float32, bitcast=True))
        tl.store(plain, numbers, mask=inside)
    tl.store(other, tl.trans(numbers), mask=tl.trans(inside))


@pytest.fixture
def weight(monkeypatch):
    """A weight, its quantized form, and another one that plain torch filled. The broken kernel is compiled anew."""
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    monkeypatch.setattr(quantize_many, "amp_quantize", amp_quantize)
    weight = torch.randn(64, 64)
    ours, expected = (fp8.buffer_like(weight, False).fill_(torch.nan) for _ in range(2))
    fp8.quantize_many_reference_([expected], [weight])
    return weight, ours, expected


def test_the_pattern_that_ptxas_compiles_wrongly_is_found(weight, monkeypatch):
    with on_a_gpu(), pytest.raises(ptxas_pattern.LosesNumbers, match=r"amp_quantize: .*e4m3x2"):
        quantize_many.quantize_many_([weight[0]], [weight[1]])


def test_the_pattern_loses_numbers_in_machine_code_but_not_in_ptx(weight, monkeypatch):
    version = subprocess.run([BIN / "ptxas", "--version"], capture_output=True, text=True, check=True).stdout
    if "V12.8.93" not in version:
        pytest.skip(f"this ptxas was not seen to lose numbers: {version.splitlines()[-2]}")
    monkeypatch.setattr(ptxas_pattern, "check", lambda ptx: None)
    weight, ours, expected = weight
    with on_a_gpu():
        quantize_many.quantize_many_([weight], [ours])
    assert same_bits(ours.view(torch.uint8), expected.view(torch.uint8))
    # Of the 4096 transposed numbers half are lost, as on an H200, or a quarter, as Triton's releases lay them out.
    lost = 2048 if triton.__version__ < "3.7" else 1024
    with (
        on_a_gpu(launcher=Both),
        pytest.raises(Differs, match=rf"amp_quantize: .* {lost} other bytes of a block of 8208 .* the first at 4096"),
    ):
        quantize_many.quantize_many_([weight], [ours])


def test_the_short_example_has_the_pattern_and_without_its_second_read_has_not():
    assert len(ptxas_pattern.risks(LOST)) == 2
    alone = re.sub(r"\$L_3:.*?ret;", "$L_3:\nret;", LOST, flags=re.DOTALL)
    assert not ptxas_pattern.risks(alone)


def test_an_unknown_instruction_names_itself_and_its_line():
    with pytest.raises(EmulatorError, match=r"PTX line 36: tanh.imagined.f32 %r1, %r2: this instruction isn't known"):
        launch.parsed(LOST.replace("\tret;", "\ttanh.imagined.f32 %r1, %r2;\n\tret;"))
