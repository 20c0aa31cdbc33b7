"""Products of linear layers add their bias themselves, with the bits of `addmm`."""

import uuid

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompile.compiler import lower
from ampcompile.kernels.packed_linear import PACKED_LINEAR
from ampcompile.kernels.packed_linear import packed_linear as multiply
from ampcompile.passes import pipeline
from ampcompile.passes.after import add_bias_in_products as module
from ampcompile.passes.after.add_bias_in_products import AddBiasInProducts
from ampcompile.torch_private import lowering
from tests.compiling import HIGH, LOW, amp, gradients, same_bits

needs_units = pytest.mark.skipif(not module.acts_here(), reason="needs a CPU with units for bfloat16")


@needs_units
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize(("inside", "outside"), [(64, 64), (64, 192), (96, 200), (400, 120), (512, 768)])
def test_the_bits_are_those_of_addmm(rows: int, inside: int, outside: int) -> None:
    x, weight, bias = (torch.randn(*shape).to(LOW) for shape in ((rows, inside), (outside, inside), (outside,)))
    assert same_bits(multiply(x, weight, weight, bias), torch.addmm(bias, x, weight.t()))
    wide = torch.empty_like(x).fill_(float("inf"))
    assert same_bits(multiply(wide, weight, weight, bias), torch.addmm(bias, wide, weight.t()))


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight.t())


SHAPES = (4, 64), (128, 64), (128,)
CASES = {  # a function, the dtype, and how many products change
    "a linear layer": (linear, LOW, 1),
    "a small layer": (linear, LOW, 0),
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
    monkeypatch.setattr(lower, "cache_key", lambda *_: str(uuid.uuid4()))  # nothing comes from caches
    model, x = nn.Sequential(nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()), torch.randn(64, 96)

    def run() -> tuple[list[Tensor | None], list[int]]:
        torch._dynamo.reset()
        compiled, _ = amp(model, lower="inductor")
        found, code = run_and_get_code(lambda: gradients(model, lambda _: compiled(x).float().square().sum()))
        return found, [graph.count("_linear_pointwise") for graph in code]

    ours, counts = run()
    after = pipeline.after
    monkeypatch.setattr(pipeline, "after", lambda *args: [p for p in after(*args) if p != AddBiasInProducts()])
    theirs, none = run()
    assert max(counts) == 2 and not any(none)
    assert all(map(same_bits, ours, theirs))
