"""`.data` in compiled code: read, written and assigned, with the numbers and side effects of stock AOTAutograd."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampcompile
from ampcompile.weights.table import places
from tests.behaviour.beside_stock import Setting
from tests.behaviour.programs import Program
from tests.compiling import eager

PROGRAMS = {
    "read": ["return x.data @ self.weight + self.weight.data.sum(),"],
    "a row of a result": ["v = x @ self.weight", "v.data[0] = 5.0", "return v.relu(),"],
    "a weight": ["y = x @ self.weight", "self.weight.data.mul_(0.5)", "return y + x @ self.weight,"],
    "rows of a weight": ["self.weight.data[1:3].fill_(0.25)", "return F.linear(x, self.weight),"],
    "assigned": ["self.weight.data = self.weight.data * 0.5", "return x @ self.weight,"],
    "a moving average": [
        "self.average.data = self.average.data * 0.9 + 0.1 * (x @ self.weight).data.float().mean(0)",
        "return x @ self.weight - self.average,",
    ],
    "a codebook, whose entries move toward what they stand for": [
        "at = (x @ self.weight.t()).argmax(1)",
        "hot = F.one_hot(at, 8).to(x.dtype)",
        "self.weight.data.mul_(0.9).add_((hot.t() @ x).data * 0.1)",
        "return x + (self.weight[at] - x).detach(),",
    ],
    "clamped": [
        "self.weight.data.clamp_(-0.2, 0.2)",
        "return (x @ self.weight).data.requires_grad_(False) * x.sum(),",
    ],
    "in a checkpoint": [
        "return checkpoint(lambda x, w: (x @ w) * w.data.mean(), x, self.weight, use_reentrant=False),"
    ],
}
BELOW_AUTOGRAD = ["y = torch.einsum('ij,jk->ik', x, self.flat[8:72].view(8, 8))"]
BELOW_AUTOGRAD += ["part = y[:]", "y.data.mul_(0.5)", "return part,"]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    ("training", "lower"),
    [
        (True, "aot_eager"),
        (True, "eager"),
        (False, "aot_eager"),
        *(pytest.param(training, "inductor", marks=pytest.mark.slow) for training in (True, False)),
    ],
)
def test_numbers_and_side_effects_are_stock_aot_autograds(name, training, lower):
    verdict, found = Setting(lower).judge(Program(0, tuple(PROGRAMS[name]), training))
    assert verdict == "same bits" or (lower == "inductor" and verdict == "as near"), (verdict, found)


def test_of_what_a_graph_for_any_number_of_rows_writes_below_autograd_only_tensors_are_cast_again():
    assert Setting("eager", dynamic=True).judge(Program(0, tuple(BELOW_AUTOGRAD), False))[0] == "same bits"


@pytest.mark.parametrize(
    ("lower", "write"), [("aot_eager", lambda w: w.data[21, 7].mul_(-9)), ("eager", lambda w: w.data[21].add_(3.0))]
)
def test_what_compiled_code_writes_through_data_is_seen_by_other_graphs(lower, write):
    """The write raises no version: here as in stock AOTAutograd. No sample lies where it is."""
    layer, x = nn.Linear(40, 30), torch.randn(3, 40)
    addresses, size = places(layer.weight)
    written = layer.weight.data_ptr() + 4 * 40 * 21
    assert not any(written - size < address < written + 4 * 40 for address in addresses)
    read = torch.compile(layer, backend="amp", options={"lower": "aot_eager"})

    def hook(w):
        write(w)
        return w.sum()

    change = torch.compile(hook, backend="amp", options={"lower": lower})
    with torch.no_grad():
        for _ in range(3):
            before = read(x)
            change(layer.weight)
            assert torch.equal(read(x), eager(layer, x)) and not torch.equal(read(x), before)


def test_a_forward_pre_hook_that_normalizes_its_weight():
    """One graph that reads the weight's copy after it was written."""

    def normalize(module, _):
        module.weight.data.div_(module.weight.data.norm(dim=1, keepdim=True))

    layer, x = nn.Linear(8, 8), torch.randn(3, 8)
    layer.register_forward_pre_hook(normalize)
    run = torch.compile(layer, backend="amp", options={"lower": "aot_eager"})
    for _ in range(3):
        with torch.no_grad():
            layer.weight.mul_(3.0)
            found = run(x)
            assert torch.allclose(layer.weight.norm(dim=1), torch.ones(8))
            assert torch.equal(found, eager(F.linear, x, layer.weight, layer.bias))


def test_weights_are_hoisted_beside_a_read_of_their_data():
    w = nn.Parameter(torch.randn(4, 4))
    report = ampcompile.explain(lambda x, w: (x @ w, w.data.sum()), lower="aot_eager")(torch.randn(3, 4), w)
    assert any("hoisted" in cast.fate for cast in report.casts)
