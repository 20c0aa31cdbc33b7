"""A linear layer that rounds its float32 weight on the way in: numbers, gradients, what becomes of it in a graph."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from ampcompile.kernels.linear_cast import LINEAR_CAST, linear_cast, linear_cast_reference, weight_gradient
from tests.compiling import error

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LOW = [torch.float16, torch.bfloat16]
SHAPES = [((1,), 67, 65), ((), 33, 5), ((3, 5), 64, 80), ((17,), 129, 31), ((2, 1, 3), 73, 97), ((0,), 8, 3)]


def operands(shape, dtype, device, bias=torch.float32, transposed=False):
    batch, inner, outer = shape
    x = torch.randn(*batch, inner, device=device, dtype=dtype, requires_grad=True)
    size = (inner, outer) if transposed else (outer, inner)
    weight = torch.randn(size, device=device).requires_grad_()
    b = None if bias is None else torch.randn(outer, device=device).to(bias).requires_grad_()
    return x, weight.t() if transposed else weight, b


def autocast(x, weight, bias):
    """The same layer with casts as eager autocast makes them."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("bias", [None, torch.float32, "low"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_value_and_gradients_are_no_further_from_float64_than_autocasts(shape, bias, dtype, transposed, device):
    given = operands(shape, dtype, device, dtype if bias == "low" else bias, transposed)
    inputs = [tensor for tensor in given if tensor is not None]
    exact = F.linear(*(None if tensor is None else tensor.to(torch.float64) for tensor in given))
    upstream = torch.randn(exact.shape, device=device).to(dtype)
    exact_grads = torch.autograd.grad(exact, inputs, upstream.double())
    out = linear_cast(*given)
    assert (out.dtype, out.shape) == (dtype, exact.shape) and out.is_contiguous()
    unfused = autocast(*given)
    grads, others = (torch.autograd.grad(y, inputs, upstream) for y in (out, unfused))
    assert [grad.dtype for grad in grads] == [tensor.dtype for tensor in inputs]
    if out.numel():
        close = 1.001 if device == "cpu" else 1.01  # a GPU's own product adds in an order of its own
        assert error([out], [exact]) <= close * error([unfused], [exact]) < 0.02
        for ours, theirs, best in zip(grads, others, exact_grads, strict=True):
            assert error([ours], [best]) <= close * error([theirs], [best]) < 0.02


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_infinite_and_nan_numbers_reach_what_they_reach_in_torch(dtype, value, device):
    for place in ("x", "weight", "bias"):
        given = dict(zip(("x", "weight", "bias"), operands(((5,), 40, 24), dtype, device), strict=True))
        given[place].detach().view(-1)[7] = value
        with torch.no_grad():
            ours, theirs = linear_cast(**given), autocast(*given.values())
        assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.isinf(), theirs.isinf())
        assert not ours.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_beyond_float16_is_infinite_as_its_cast_would_be(device):
    x, weight = torch.ones(2, 8, device=device, dtype=torch.float16), torch.full((3, 8), 65520.0, device=device)
    assert (
        linear_cast(x, weight, None).isinf().all() and (linear_cast(x, weight * 0 + 65503.0 / 8, None) == 65504).all()
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
def test_the_gradient_of_a_weight_keeps_float32s_digits_and_range(dtype, device):
    grad, x = torch.full((2, 3), 300.0, device=device, dtype=dtype), torch.full((2, 4), 301.0, device=device)
    found = weight_gradient(grad, x.to(dtype))
    assert found.dtype == torch.float32 and (found == 2 * 300 * x.to(dtype)[0, 0].float()).all()
    if dtype == torch.float16:  # autocast's is infinite, and the step is skipped
        assert (grad.t() @ x.to(dtype)).isinf().all()


def test_on_the_cpu_it_is_its_reference():
    given = operands(((3, 4), 21, 13), torch.bfloat16, "cpu")
    assert torch.equal(linear_cast(*given), linear_cast_reference(*given))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.ci)])
def test_compiled_for_every_number_of_rows(backend):
    compiled = torch.compile(lambda *given: linear_cast(*given).float().square().sum(), backend=backend, dynamic=True)
    for rows in (5, 9, 33):
        given = operands(((rows,), 21, 13), torch.bfloat16, "cpu")
        expected = linear_cast(*given).float().square().sum()
        with torch._dynamo.config.patch(error_on_recompile=rows != 5):
            out = compiled(*given)
        assert out.item() == pytest.approx(expected.item(), rel=1e-3)
        inputs = [tensor for tensor in given if tensor is not None]
        for ours, theirs in zip(torch.autograd.grad(out, inputs), torch.autograd.grad(expected, inputs), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * theirs.abs().max().item())


TRACE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from torch._dynamo.source import ConstantSource
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from ampcompile.kernels.linear_cast import linear_cast, weight_gradient

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Driver())
with FakeTensorMode():
    x, weight = torch.empty(3, 5, 48, dtype=torch.bfloat16, device="cuda"), torch.empty(32, 48, device="cuda")
    grad = torch.empty(15, 32, dtype=torch.bfloat16, device="cuda")
    def both(x, weight, grad):
        return linear_cast(x, weight, None), linear_cast(grad, weight.t(), None), weight_gradient(grad, x.view(15, 48))
    code = aot_export_joint_simple(both, (x, weight, grad), trace_joint=False).code
print(code)
assert code.count("triton_kernel_wrapper_functional(") == 2 and code.count("tensors_to_clone = ['out']") == 2
assert code.count("aten.mm.dtype(") == 1 and "float32" in code and "_to_copy" not in code

shapes = ShapeEnv()
with FakeTensorMode(shape_env=shapes):
    rows = shapes.create_symbol(5, ConstantSource("rows"), dynamic_dim=DimDynamic.DYNAMIC)
    x = torch.empty(shapes.create_symintnode(rows, hint=5), 48, dtype=torch.bfloat16, device="cuda")
    weight = torch.empty(32, 48, device="cuda")
    code = aot_export_joint_simple(lambda *given: (linear_cast(*given, None),), (x, weight), trace_joint=False).code
print(code)
assert "grid = [(floordiv, 1, 1)]" in code and "'rows': sym_size_int," in code and not shapes.guards
"""


def test_traced_for_cuda_it_is_kernels_and_a_product_of_float32_for_any_number_of_rows():
    pytest.importorskip("triton")
    result = subprocess.run([sys.executable, "-c", TRACE], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_op_keeps_torchs_rules():
    given = operands(((6,), 21, 13), torch.bfloat16, "cpu")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(LINEAR_CAST, given, test_utils=checks)
