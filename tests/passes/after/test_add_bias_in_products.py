"""Linear layers' products add their bias themselves; tests/kernels/test_packed_linear.py compares their bits."""

import pytest
import torch
from torch import Tensor, nn

from ampcompile.passes.after import add_bias_in_products as module
from ampcompile.passes.after.add_bias_in_products import AddBiasInProducts
from ampcompile.torch_private import lowering
from tests.compiling import HIGH, LOW, gradients_and_code, leave_out, same_bits
from tests.passes.tidied import traced, words

needs_units = pytest.mark.skipif(not module.acts_here(), reason="needs a CPU with units for bfloat16")


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight.t())


ROWS, WEIGHT, BIAS = (4, 64), (128, 64), (128,)
CASES = {  # a function of a left matrix, a weight and a bias; their shapes; and the ops afterwards
    "a linear layer": (linear, (ROWS, WEIGHT, BIAS), "packed_linear"),
    "a small layer": (linear, ((4, 17), (128, 17), BIAS), "t addmm"),
    "a matrix that isn't transposed": (
        lambda x, weight, bias: torch.addmm(bias, x, weight.permute(0, 1)),
        (ROWS, (64, 64), (64,)),
        "permute addmm",
    ),
    "a computed weight": (lambda x, weight, bias: linear(x, weight * 2, bias), (ROWS, WEIGHT, BIAS), "mul t addmm"),
    "a weight that isn't transposed": (
        lambda x, weight, bias: torch.addmm(bias, weight, x.t() @ x),
        ((4, 128), (64, 128), BIAS),
        "t mm addmm",
    ),
    "a computed bias": (lambda x, weight, bias: linear(x, weight, bias + 1), (ROWS, WEIGHT, BIAS), "add t addmm"),
    "a matrix for a bias": (
        lambda x, weight, bias: linear(x, weight, x @ weight.t()),
        (ROWS, WEIGHT, BIAS),
        "t mm t addmm",
    ),
    "a factor": (
        lambda x, weight, bias: torch.addmm(bias, x, weight.t(), alpha=2),
        (ROWS, WEIGHT, BIAS),
        "t addmm",
    ),
}


@pytest.mark.parametrize("templates", [False, True])
@pytest.mark.parametrize("dtype", [LOW, HIGH])
@pytest.mark.parametrize("name", CASES)
def test_what_changes(name: str, dtype: torch.dtype, templates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in float32, and nothing where Inductor may choose templates, which add the bias themselves."""
    monkeypatch.setattr(module, "acts_here", lambda: True)
    monkeypatch.setattr(lowering, "stores_products", lambda: not templates)
    f, shapes, ops = CASES[name]
    gm = traced(f, *(torch.randn(shape, dtype=dtype) for shape in shapes))
    before = words(gm)
    changed = AddBiasInProducts().apply(gm)
    assert words(gm) == (before if templates or dtype == HIGH else ops)
    assert changed == words(gm).count("packed_linear") and AddBiasInProducts().apply(gm) == 0


@needs_units
def test_a_training_step_keeps_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()), torch.randn(64, 96)
    ours, code = gradients_and_code(model, x, monkeypatch)
    leave_out(AddBiasInProducts(), monkeypatch)
    theirs, without = gradients_and_code(model, x, monkeypatch)
    assert [max(graph.count("_linear_pointwise") for graph in each) for each in (code, without)] == [2, 0]
    assert same_bits(ours, theirs)
