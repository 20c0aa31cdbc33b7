"""Quantized products: the recipe's numbers bit by bit, gradients, what isn't finite, layouts that a GPU asks for."""

import types

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompile.kernels import fp8
from tests.compiling import same_bits
from tests.devices import DEVICES

LOW, HALF = torch.bfloat16, torch.float16
SHAPES = [(32, 64, 48), (16, 16, 16), (5, 32, 16), (1, 128, 64)]
RECIPES = [*fp8.GRADIENTS]


def operands(rows: int, inner: int, outer: int, dtype: torch.dtype, turned: bool) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(rows, inner).to(dtype).requires_grad_()
    weight = torch.randn((inner, outer) if turned else (outer, inner)).requires_grad_()
    return x, weight, torch.randn(rows, outer).to(dtype)


def run(
    x: Tensor, weight: Tensor, grad: Tensor, turned: bool, recipe: str = "fp8", device: str = "cpu"
) -> list[Tensor]:
    """The result and the gradients of both operands, on the CPU, of products on the device."""
    by_rows, there, matrix = recipe == fp8.BY_ROWS, x.to(device), weight.to(device)
    quantized = fp8.quantize(there, by_rows), fp8.quantize_weight(matrix, by_rows)
    result = fp8.fp8_linear(there, *quantized[0], matrix, quantized[1], turned, recipe).cpu()
    return [result.detach(), *torch.autograd.grad(result, (x, weight), grad)]


def plain(x: Tensor, dtype: torch.dtype, by_rows: bool, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """A tensor's quantized numbers and scale, or its rows' scales, by loops over nothing but torch's own conversion."""
    if by_rows:
        rows = [plain(row, dtype, False, power_of_two) for row in x]
        return torch.stack([row for row, _ in rows]), torch.stack([scale for _, scale in rows])[:, None]
    limit, largest = torch.finfo(dtype).max, max(x.float().abs().max().item(), 2.0**-100)
    factor = torch.tensor(limit, dtype=torch.float32) / torch.tensor(largest, dtype=torch.float32)
    if power_of_two:
        factor = torch.tensor(2.0 ** (torch.frexp(factor)[1].item() - 1))
    numbers = (x.float() * factor).clamp(-limit, limit).to(dtype)
    return numbers, 1 / factor if power_of_two else torch.tensor(largest) / limit


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [LOW, HALF])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("device", DEVICES)
def test_all_three_products_are_those_of_the_quantized_numbers(device, recipe, shape, dtype, turned):
    x, weight, grad = operands(*shape, dtype, turned)
    found, by_rows = run(x, weight, grad, turned, recipe, device), recipe == fp8.BY_ROWS
    turned_weight = weight.detach().t()
    forward, backward = (turned_weight, weight.detach()) if turned else (weight.detach(), turned_weight)
    (x8, of_x), (w8, of_w), (g8, of_g), (v8, of_v) = (
        plain(x, fp8.E4M3, by_rows),
        plain(forward, fp8.E4M3, by_rows, True),
        plain(grad, fp8.E5M2 if recipe == "fp8" else fp8.E4M3, by_rows),
        plain(backward, fp8.E4M3, by_rows, True),
    )
    pairs = (x8, of_x), (w8, of_w), (g8, of_g), (v8, of_v)
    a, b, g, v = (each.double() * scale.double() for each, scale in pairs)
    # The gradient of the weight by rows, and of a few rows, isn't one of quantized gradients.
    exact_g = g if shape[0] % 16 == 0 and not by_rows else grad.double()
    to_weight = exact_g.t() @ (x.detach().double() if by_rows else a)
    sums = 1e-5 if device == "cpu" else 1e-3  # a GPU's units add quantized products in fewer bits than float32 has
    for mine, expected in zip(found, (a @ b.t(), g @ v.t(), to_weight.t() if turned else to_weight), strict=True):
        unit = torch.finfo(dtype).eps
        assert ((mine.double() - expected).abs() <= unit * expected.abs() + sums * expected.abs().max()).all()
    assert found[0].dtype == found[1].dtype == dtype and found[2].dtype == torch.float32
    numbers, scale = (each.cpu() for each in fp8.quantize(x.to(device), by_rows))
    assert same_bits((numbers.float(), scale), (x8.float(), of_x))
    made = fp8.quantize_weight(weight.to(device), by_rows).cpu()
    matrix, other, scales, largest = fp8.parts(made, *weight.shape)
    ours, theirs = ((v8, of_v), (w8, of_w)) if turned else ((w8, of_w), (v8, of_v))
    assert same_bits((matrix.float(), other.float()), (ours[0].float(), theirs[0].float()))
    both = torch.cat([ours[1].flatten(), theirs[1].flatten()]) if by_rows else ours[1]
    magnitudes = torch.cat([weight.abs().amax(1), weight.abs().amax(0)]) if by_rows else weight.abs().max()
    assert same_bits((scales, largest), (both, magnitudes.detach()))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("turned", [False, True])
def test_where_sums_are_exact_all_bits_are_those_of_dequantized_operands(recipe, turned):
    shape = (48, 32) if not turned else (32, 48)
    x, weight, grad = (torch.randint(-8, 9, size).float() for size in ((16, 32), shape, (16, 48)))
    for each in (x, weight, grad):
        each[:, 0], each[0] = 7.0, 7.0  # each row's and column's largest number divides a type's: scales are exact
        each.clamp_(-7, 7)
    x, grad = x.to(LOW), grad.to(LOW)
    matrix = weight.t() if turned else weight
    by_hand = [x.float() @ matrix.t(), grad.float() @ matrix, grad.float().t() @ x.float()]
    by_hand[2] = by_hand[2].t() if turned else by_hand[2]
    if recipe == fp8.BY_ROWS:
        by_hand[2] = by_hand[2].to(LOW).float()
    found = run(x.requires_grad_(), weight.requires_grad_(), grad, turned, recipe)
    assert same_bits(found, [by_hand[0].to(LOW), by_hand[1].to(LOW), by_hand[2]])


def test_rows_that_differ_by_far_keep_their_numbers_with_a_scale_for_each():
    x, weight, grad = operands(32, 64, 48, LOW, False)
    factors = torch.exp2(torch.arange(32.0) - 24)[:, None]
    with torch.no_grad():
        x.mul_(factors.to(LOW))
    truth = x.double() @ weight.double().t()
    errors = [
        ((run(x, weight, grad, False, recipe)[0].double() - truth).norm(dim=1) / truth.norm(dim=1)).max()
        for recipe in ("fp8", fp8.BY_ROWS)
    ]
    assert errors[0] == 1 and errors[1] < 0.06


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_finite_in_16_bits_is_not_finite_here_and_nothing_else_is_lost(device, recipe, value, which):
    given = [each.detach().clone() for each in operands(32, 64, 48, LOW, False)]
    given[which][3, 5] = value
    x, weight, grad = given[0].requires_grad_(), given[1].requires_grad_(), given[2]
    low = torch.nn.functional.linear(x.double(), weight.to(LOW).double())  # oneDNN of 2.11 spreads NaN to a row beside
    theirs = [low.detach(), *torch.autograd.grad(low, (x, weight), grad.double())]
    for mine, other in zip(run(x, weight, grad, False, recipe, device), theirs, strict=True):
        assert same_bits(mine.isfinite(), other.isfinite())


def test_a_weight_that_is_infinite_in_float16_gives_nothing_finite_there():
    """By rows a product gives bfloat16 alone."""
    x, weight, grad = operands(32, 64, 48, HALF, False)
    with torch.no_grad():
        weight[3, 5] = 65520.0
    assert all(each.isnan().all() for each in run(x, weight, grad, False)[:2])
    assert run(x.detach().to(LOW).requires_grad_(), weight, grad.to(LOW), False)[0].isfinite().all()
    with torch.no_grad():
        weight[7, 9] = 3.397e38  # in bfloat16
    assert run(x.detach().to(LOW).requires_grad_(), weight, grad.to(LOW), False)[0].isnan().any(0).nonzero() == 7
    with torch.no_grad():
        weight[7, 9], weight[3, 5] = 1.0, 65519.0
    assert not run(x, weight, grad, False)[1].isnan().any()


@pytest.mark.parametrize("factor", [0.0, 2.0**-140, 2.0**-60, 2.0**60, 2.0**120])
@pytest.mark.parametrize("recipe", RECIPES)
def test_magnitudes_far_from_one(recipe, factor):
    x, weight, grad = operands(32, 64, 48, LOW, False)
    with torch.no_grad():
        weight.mul_(factor)
    found, truth = run(x, weight, grad, False, recipe)[0].double(), x.double() @ weight.double().t()
    assert found.isfinite().all()
    assert (found - truth).norm() <= 0.06 * truth.norm() + 1e-38 * found.numel()


def test_a_weights_scale_is_a_power_of_two_that_leaves_no_bit_unused():
    for _ in range(50):
        weight = torch.randn(16, 16) * 2.0 ** torch.randint(-30, 30, ())
        numbers, _, scale, _ = fp8.parts(fp8.quantize_weight(weight, False), 16, 16)
        assert torch.frexp(scale)[0] == 0.5 and 224 <= numbers.float().abs().max() <= 448


@pytest.mark.parametrize("factor", [0.0, torch.inf, torch.nan])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("device", DEVICES)
def test_operands_without_a_finite_number_above_zero(device, recipe, factor):
    given = [each.detach() for each in operands(32, 64, 48, LOW, False)]
    for which in range(3):
        x, weight, grad = (factor * torch.ones_like(each) if i == which else each for i, each in enumerate(given))
        found = run(x.requires_grad_(), weight.requires_grad_(), grad, False, recipe, device)
        touched = [{0, 2}, {0, 1}, {1, 2}][which]
        assert [bool(each.isfinite().all()) for each in found] == [factor == 0 or i not in touched for i in range(3)]
        assert factor != 0 or all(found[i].eq(0).all() for i in touched)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [32, 5])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpus_checks_of_layouts_and_sizes_pass(recipe, rows, turned):
    by_rows = recipe == fp8.BY_ROWS

    def step(x: Tensor, weight: Tensor, buffer: Tensor, grad: Tensor) -> list[Tensor]:
        given = x, *fp8.quantized(x, fp8.E4M3, by_rows), weight, buffer, turned, recipe, None, None
        ctx = types.SimpleNamespace(needs_input_grad=[True] * 9)
        ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
        fp8._remember(ctx, given, x)  # autograd's engine has no CUDA here
        return [fp8.fp8_linear._init_fn(*given), *(each for each in fp8._backward(ctx, grad) if each is not None)]

    with FakeTensorMode():
        shapes = (rows, 64), (64, 48) if turned else (48, 64), (rows, 48)
        given = [
            torch.empty(shape, dtype=dtype, device="cuda")
            for shape, dtype in zip(shapes, (LOW, None, LOW), strict=True)
        ]
        buffer = fp8.buffer_like(given[1], by_rows)
        graph = make_fx(step)(*given[:2], buffer, given[2]).graph
    products = graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default)
    assert len(products) == (3 if rows % 16 == 0 and not by_rows else 2)
    assert all(node.meta["val"].device.type == "cuda" for node in products)
    dtypes = [[node.args[i].meta["val"].dtype for i in range(2)] for node in products]
    assert [fp8.E5M2, fp8.E5M2] not in dtypes
    assert (fp8.E5M2 in [dtype for pair in dtypes for dtype in pair]) == (recipe == "fp8")
