"""A packed convolution has the bits of the plain one on a channels-last input, and the strides of the plain one."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from ampcompile.kernels.packed_conv import ConvBlocks, packed_conv
from ampcompile.kernels.packed_linear import available
from tests.compiling import same_bits
from tests.kernels.references import packed_conv_reference

pytestmark = pytest.mark.skipif(not available(torch.bfloat16), reason="this CPU's oneDNN has no bfloat16 products")
LAYOUTS = (torch.contiguous_format, torch.channels_last)
DRAWS = 60


def drawn() -> tuple[Tensor, Tensor, Tensor | None, ConvBlocks]:
    """An input, a weight, a bias and settings: groups, kernels that are no squares, odd numbers of channels."""
    groups, each_in, each_out = one_of(
        (1, 3, 40), (1, 17, 32), (1, 32, 17), (2, 8, 3), (4, 16, 16), (16, 1, 1), (16, 1, 2)
    )
    height, width = one_of((1, 1), (3, 3), (5, 5), (1, 3), (4, 1))
    padding = one_of((0, 0), (1, 1), (height // 2, width // 2))
    x = torch.randn(one_of(1, 3), groups * each_in, one_of(9, 14), one_of(9, 16)).bfloat16()
    weight = torch.randn(groups * each_out, each_in, height, width) / (each_in * height * width) ** 0.5
    bias = one_of(torch.randn(groups * each_out).bfloat16(), None)
    size = one_of(None, tuple(x.shape), (8, groups * each_in, 30, 31))
    oblong = (2, 1) if each_in == 1 < each_out else (1, 2)  # with (1, 2) oneDNN leaves pixels unwritten
    blocks = ConvBlocks(one_of((1, 1), (2, 2), oblong), padding, one_of((1, 1), (2, 2)), groups, size)
    return x.contiguous(memory_format=torch.channels_last), weight, bias, blocks


def one_of(*choices: Any) -> Any:
    return choices[int(torch.randint(len(choices), ()))]


def strides(tensor: Tensor) -> list[int]:
    """Where they tell something."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def test_same_bits_as_the_plain_convolution() -> None:
    for _ in range(DRAWS):
        x, weight, bias, blocks = drawn()
        copy = weight.bfloat16()
        expected = packed_conv_reference(x, copy, bias, blocks)
        for form in (copy, blocks.pack(copy)):
            found = packed_conv(x, weight, form, bias, blocks)
            assert same_bits(found, expected), (x.shape, weight.shape, blocks)
            assert strides(found) == strides(expected), (x.shape, weight.shape, blocks)


def test_in_float32_the_numbers_of_float64() -> None:
    """ATen runs some in another kernel, with other last bits."""
    for _ in range(DRAWS):
        x, weight, bias, blocks = drawn()
        x, bias = x.float(), None if bias is None else bias.float()
        exact = packed_conv_reference(x.double(), weight, None if bias is None else bias.double(), blocks)
        plain = packed_conv_reference(x, weight, bias, blocks)
        for form in (weight, blocks.pack(weight)):
            found = packed_conv(x, weight, form, bias, blocks)
            assert (found - exact).abs().max() <= 1e-5 * exact.abs().max(), (x.shape, weight.shape, blocks)
            assert strides(found) == strides(plain), (x.shape, weight.shape, blocks)


@pytest.mark.parametrize("of_weight", LAYOUTS)
@pytest.mark.parametrize("of_input", [*LAYOUTS, None])
@pytest.mark.parametrize("shape", [(2, 3, 8, 9), (2, 1, 8, 9), (2, 3, 1, 1), (1, 3, 1, 6)])
def test_strides_are_those_of_the_plain_convolution(shape: tuple[int, ...], of_input: Any, of_weight: Any) -> None:
    x = torch.randn(shape).bfloat16()
    x = x.transpose(2, 3) if of_input is None else x.contiguous(memory_format=of_input)
    weight = torch.randn(4, shape[1], 3, 3).contiguous(memory_format=of_weight)
    copy, blocks = weight.bfloat16(), ConvBlocks((1, 1), (1, 1), (1, 1), 1)
    expected = packed_conv_reference(x, copy, None, blocks)
    for form in (copy, blocks.pack(copy)):
        found = packed_conv(x, weight, form, None, blocks)
        assert strides(found) == strides(expected) and torch.allclose(found, expected, rtol=0.02, atol=0.02)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = map(mode.from_tensor, (x, weight, copy))
        fake = packed_conv(*fakes, None, blocks)
    assert (fake.shape, fake.stride(), fake.dtype) == (expected.shape, expected.stride(), expected.dtype)
