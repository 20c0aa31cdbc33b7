import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcompile.dtypes import is_lossless, representable, short_name, widest

FP8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
SIXTEEN = [torch.float16, torch.bfloat16]
ALL = [*FP8, *SIXTEEN, torch.float32, torch.float64]


def values_of(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a dtype of 8 or 16 bits; of a wider one, random bit patterns of every exponent."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    integers = {4: torch.int32, 8: torch.int64}[dtype.itemsize]
    info = torch.iinfo(integers)
    return torch.randint(info.min, info.max, (100_000,), dtype=integers).view(dtype)


def as_float64(values: torch.Tensor) -> torch.Tensor:
    # by float32 where torch has no direct way; exact from every type of at most 32 bits
    return values.double() if values.dtype in (torch.float32, torch.float64) else values.float().double()


@pytest.mark.parametrize("src,dst", list(itertools.product(ALL, ALL)), ids=str)
def test_lossless_means_that_every_value_survives(src, dst):
    values = values_of(src)
    before, after = as_float64(values), as_float64(values.to(dst))
    both_nan = before.isnan() & after.isnan()
    same = both_nan | ((before == after) & (before.signbit() == after.signbit()))
    assert is_lossless(src, dst) == bool(same.all())


def test_short_names():
    names = [short_name(dtype) for dtype in [*ALL, torch.int64, torch.uint8, torch.bool, torch.complex64]]
    eight_bits = ["f8_e4m3fn", "f8_e4m3fnuz", "f8_e5m2", "f8_e5m2fnuz", "f8_e8m0fnu"]
    assert names == [*eight_bits, "f16", "bf16", "f32", "f64", "i64", "u8", "bool", "c64"]


@pytest.mark.parametrize(
    "dtypes,expected",
    [
        ([], None),
        ([torch.int64, torch.float64], None),
        ([torch.bfloat16, torch.int32], torch.bfloat16),
        ([torch.bfloat16, torch.float32], torch.float32),
        ([torch.bfloat16, torch.float16], torch.float32),
        ([torch.bfloat16, torch.float64], torch.bfloat16),
    ],
)
def test_widest_promotes_as_autocast(dtypes, expected):
    assert widest(dtypes) == expected


@pytest.mark.parametrize("dtype", [*SIXTEEN, torch.float32, torch.float64], ids=str)
@given(value=st.floats(width=32))
def test_representable_agrees_with_a_cast(dtype, value):
    cast = torch.tensor(value, dtype=torch.float32).to(dtype).item()
    survives = math.isfinite(cast) and (cast != 0) == (value != 0)
    assert representable(value, dtype) == (survives or not math.isfinite(value))


@pytest.mark.parametrize("dtype", [*SIXTEEN, torch.float32], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_representable_at_its_limits(dtype, sign):
    info = torch.finfo(dtype)
    half_step = info.eps * 2 ** math.floor(math.log2(info.max)) / 2
    tiny = info.smallest_normal * info.eps
    assert representable(sign * math.nextafter(info.max + half_step, 0), dtype)
    assert not representable(sign * (info.max + half_step), dtype), "a tie rounds to the even infinity"
    assert representable(sign * math.nextafter(tiny / 2, 1), dtype)
    assert not representable(sign * tiny / 2, dtype), "a tie rounds to the even zero"
