"""Linear layers' products add their bias themselves; tests/kernels/test_packed_linear.py compares their bits."""

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompile.kernels.packed_linear import PACKED_LINEAR
from ampcompile.passes.after import add_bias_in_products as module
from ampcompile.passes.after.add_bias_in_products import AddBiasInProducts
from ampcompile.torch_private import lowering
from tests.compiling import HIGH, LOW, gradients_and_code, leave_out, same_bits

needs_units = pytest.mark.skipif(not module.acts_here(), reason="needs a CPU with units for bfloat16")


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight.t())


SHAPES = (4, 64), (128, 64), (128,)
CASES = {  # a function, the dtype, and how many products change
    "a linear layer": (linear, LOW, 1),
    "a small layer": (linear, LOW, 0),
    "a matrix that isn't transposed": (lambda x, weight, bias: torch.addmm(bias, x, weight.permute(0, 1)), LOW, 0),
    "float32": (linear, HIGH, 0),
    "a computed weight": (lambda x, weight, bias: linear(x, weight * 2, bias), LOW, 0),
    "a weight that isn't transposed": (lambda x, weight, bias: torch.addmm(bias, weight, x.t() @ x), LOW, 0),
    "a computed bias": (lambda x, weight, bias: linear(x, weight, bias + 1), LOW, 0),
    "a matrix for a bias": (lambda x, weight, bias: torch.addmm(x @ weight.t(), x, weight.t()), LOW, 0),
    "a factor": (lambda x, weight, bias: torch.addmm(bias, x, weight.t(), alpha=2), LOW, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_what_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "acts_here", lambda: True)
    f, dtype, expected = CASES[name]
    shapes = {
        "a weight that isn't transposed": ((4, 128), (64, 128), (128,)),
        "a small layer": ((4, 17), (128, 17), (128,)),
        "a matrix that isn't transposed": ((4, 64), (64, 64), (64,)),
    }
    gm = make_fx(f, tracing_mode="fake")(*(torch.randn(*shape, dtype=dtype) for shape in shapes.get(name, SHAPES)))
    assert AddBiasInProducts().apply(gm) == expected
    assert len(gm.graph.find_nodes(op="call_function", target=PACKED_LINEAR)) == expected
    assert AddBiasInProducts().apply(gm) == 0


def test_not_where_inductor_may_choose_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "acts_here", lambda: True)
    monkeypatch.setattr(lowering, "stores_products", lambda: False)
    gm = make_fx(linear, tracing_mode="fake")(*(torch.randn(*shape, dtype=LOW) for shape in SHAPES))
    assert AddBiasInProducts().apply(gm) == 0


@needs_units
def test_a_training_step_keeps_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()), torch.randn(64, 96)
    ours, code = gradients_and_code(model, x, monkeypatch)
    leave_out(AddBiasInProducts(), monkeypatch)
    theirs, without = gradients_and_code(model, x, monkeypatch)
    assert [max(graph.count("_linear_pointwise") for graph in each) for each in (code, without)] == [2, 0]
    assert same_bits(ours, theirs)
