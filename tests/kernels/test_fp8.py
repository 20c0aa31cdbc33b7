"""Quantized products: the recipe's numbers bit by bit, gradients, what isn't finite, layouts that a GPU asks for."""

import types

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompile.kernels import fp8
from tests.compiling import same_bits

LOW, HALF = torch.bfloat16, torch.float16
SHAPES = [(32, 64, 48), (16, 16, 16), (5, 32, 16), (1, 128, 64)]


def operands(rows: int, inner: int, outer: int, dtype: torch.dtype, turned: bool) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(rows, inner).to(dtype).requires_grad_()
    weight = torch.randn((inner, outer) if turned else (outer, inner)).requires_grad_()
    return x, weight, torch.randn(rows, outer).to(dtype)


def run(x: Tensor, weight: Tensor, grad: Tensor, turned: bool) -> list[Tensor]:
    """The result and the gradients of both operands."""
    result = fp8.fp8_linear(x, *fp8.quantize(x), weight, fp8.quantize_weight(weight), turned)
    return [result.detach(), *torch.autograd.grad(result, (x, weight), grad)]


def plain(x: Tensor, dtype: torch.dtype, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """A tensor's quantized numbers and scale, by loops over nothing but torch's own conversion."""
    limit, largest = torch.finfo(dtype).max, max(x.float().abs().max().item(), 2.0**-100)
    factor = torch.tensor(limit, dtype=torch.float32) / torch.tensor(largest, dtype=torch.float32)
    if power_of_two:
        factor = torch.tensor(2.0 ** (torch.frexp(factor)[1].item() - 1))
    numbers = (x.float() * factor).clamp(-limit, limit).to(dtype)
    return numbers, 1 / factor if power_of_two else torch.tensor(largest) / limit


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [LOW, HALF])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_three_products_are_those_of_the_quantized_numbers(shape, dtype, turned):
    x, weight, grad = operands(*shape, dtype, turned)
    found = run(x, weight, grad, turned)
    (x8, of_x), (w8, of_w), (g8, of_g) = (
        plain(x, torch.float8_e4m3fn),
        plain(weight, torch.float8_e4m3fn, True),
        plain(grad, torch.float8_e5m2),
    )
    a, b, g = ((each.double() * scale.double()) for each, scale in ((x8, of_x), (w8, of_w), (g8, of_g)))
    b = b.t() if turned else b
    exact_g = g if shape[0] % 16 == 0 else grad.double()  # a few rows' gradient of the weight isn't quantized
    to_weight = exact_g.t() @ a
    for mine, expected in zip(found, (a @ b.t(), g @ b, to_weight.t() if turned else to_weight), strict=True):
        unit = torch.finfo(dtype).eps
        assert ((mine.double() - expected).abs() <= unit * expected.abs() + 1e-5 * expected.abs().max()).all()
    assert found[0].dtype == found[1].dtype == dtype and found[2].dtype == torch.float32
    numbers, scale = fp8.quantize(x)
    assert same_bits((numbers.float(), scale), (x8.float(), of_x))
    matrix, other, scale, largest = fp8.parts(fp8.quantize_weight(weight), *weight.shape)
    assert same_bits((matrix.float(), other.float(), scale), (w8.float(), w8.t().float(), of_w))
    assert largest == weight.abs().max()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_distance_from_float64_is_that_of_three_and_two_bits(shape):
    x, weight, grad = operands(*shape, LOW, False)
    found = run(x, weight, grad, False)
    exact = [x.double() @ weight.double().t(), grad.double() @ weight.double(), grad.double().t() @ x.double()]
    for mine, truth, bound in zip(found, exact, (0.06, 0.1, 0.1), strict=True):
        assert (mine.double() - truth).norm() <= bound * truth.norm()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("which", range(3))
def test_what_is_not_finite_in_16_bits_is_not_finite_here_and_nothing_else_is_lost(value, which):
    given = [each.detach().clone() for each in operands(32, 64, 48, LOW, False)]
    given[which][3, 5] = value
    x, weight, grad = given[0].requires_grad_(), given[1].requires_grad_(), given[2]
    low = torch.nn.functional.linear(x, weight.to(LOW))
    theirs = [low.detach(), *torch.autograd.grad(low, (x, weight), grad)]
    for mine, other in zip(run(x, weight, grad, False), theirs, strict=True):
        assert same_bits(mine.isfinite(), other.isfinite())


def test_a_weight_that_is_infinite_in_float16_gives_nothing_finite_there():
    x, weight, grad = operands(32, 64, 48, HALF, False)
    with torch.no_grad():
        weight[3, 5] = 65520.0
    assert all(each.isnan().all() for each in run(x, weight, grad, False)[:2])
    assert run(x.detach().to(LOW).requires_grad_(), weight, grad.to(LOW), False)[0].isfinite().all()
    with torch.no_grad():
        weight[3, 5] = 65519.0
    assert not run(x, weight, grad, False)[1].isnan().any()


@pytest.mark.parametrize("factor", [0.0, 2.0**-140, 2.0**-60, 2.0**60, 2.0**120])
def test_magnitudes_far_from_one(factor):
    x, weight, grad = operands(32, 64, 48, LOW, False)
    with torch.no_grad():
        weight.mul_(factor)
    found, truth = run(x, weight, grad, False)[0].double(), x.double() @ weight.double().t()
    assert found.isfinite().all()
    assert (found - truth).norm() <= 0.06 * truth.norm() + 1e-38 * found.numel()


def test_a_weights_scale_is_a_power_of_two_that_leaves_no_bit_unused():
    for _ in range(50):
        weight = torch.randn(16, 16) * 2.0 ** torch.randint(-30, 30, ())
        numbers, _, scale, _ = fp8.parts(fp8.quantize_weight(weight), 16, 16)
        assert torch.frexp(scale)[0] == 0.5 and 224 <= numbers.float().abs().max() <= 448


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [32, 5])
def test_a_gpus_checks_of_layouts_and_sizes_pass(rows, turned):
    def step(x: Tensor, weight: Tensor, buffer: Tensor, grad: Tensor) -> list[Tensor]:
        given = x, *fp8.quantized(x, fp8.E4M3), weight, buffer, turned
        ctx = types.SimpleNamespace(needs_input_grad=[True] * 6)
        ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
        fp8._remember(ctx, given, x)  # autograd's engine has no CUDA here
        return [fp8._product(*given), *(each for each in fp8._backward(ctx, grad) if each is not None)]

    with FakeTensorMode():
        shapes = (rows, 64), (64, 48) if turned else (48, 64), (rows, 48)
        given = [
            torch.empty(shape, dtype=dtype, device="cuda")
            for shape, dtype in zip(shapes, (LOW, None, LOW), strict=True)
        ]
        buffer = fp8.buffer_like(given[1])
        graph = make_fx(step)(*given[:2], buffer, given[2]).graph
    products = graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default)
    assert len(products) == (3 if rows % 16 == 0 else 2)
    assert all(node.meta["val"].device.type == "cuda" for node in products)
    dtypes = [[node.args[i].meta["val"].dtype for i in range(2)] for node in products]
    assert [fp8.E5M2, fp8.E5M2] not in dtypes
