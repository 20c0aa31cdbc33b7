"""Lengths and positions stay in float32: an index computed through 16 bits is another index."""

import pytest
import torch

import ampcompile
from ampcompile.passes.decide.range_guards import lengths
from tests.compiling import HALF, HIGH, LOW, amp, eager, same_bits
from tests.passes.captured import captured

MASK = torch.empty(3, 5000, dtype=torch.bool)
ONES = torch.ones(5000, 1)
FRAMES = torch.tensor([[2049, 3001, 77]])

FIRES = {  # numbers that come of integers and become integers again; what is multiplied is rounded by 16 bits
    "a count taken by a product": lambda mask, n, x: torch.mm(mask.float(), torch.ones(5000, 1)).long(),
    "frames to samples": lambda mask, n, x: torch.mm(n.float().t(), torch.full((1, 2), 1.5)).floor(),
    "a place in a table": lambda mask, n, x: x[torch.matmul(n.float(), torch.ones(3, 3)).ceil().int() % 5],
    "through views and sums": lambda mask, n, x: torch.matmul(mask.float(), torch.ones(5000)).view(3, 1).sum().round(),
}
X = torch.empty(5, 4)


@pytest.fixture(autouse=True)
def drawn() -> None:
    """Numbers of the test's own seed."""
    MASK.bernoulli_(0.7)
    X.normal_()


@pytest.mark.parametrize("dtype", [LOW, HALF])
def test_fires_and_is_exact_and_without_guards_as_eager(dtype):
    def f(*args):
        return {name: each(*args) for name, each in FIRES.items()}

    args = MASK, FRAMES, X
    assert same_bits(amp(f, dtype=dtype)[0](*args), f(*args))
    torch._dynamo.reset()
    assert same_bits(amp(f, dtype=dtype, range_guards=False)[0](*args), eager(f, *args, dtype=dtype))


def test_explain_says_why():
    report = ampcompile.explain(FIRES["frames to samples"], dtype=HALF)(MASK, FRAMES, X)
    assert "range guard: a length or position, which f16 doesn't count exactly" in [op.because for op in report.ops]


DECLINES = {
    "numbers that stay floating": lambda mask, n, x: torch.mm(mask.float(), torch.ones(5000, 1)).sin(),
    "what is computed from activations": lambda mask, n, x: torch.mm(x, x.t()).round(),
    "counts beside activations": lambda mask, n, x: torch.mm(x.t(), torch.ones(5, 2)).long(),
    "random numbers": lambda mask, n, x: torch.mm(torch.rand(3, 3), torch.ones(3, 3)).floor(),
    "a comparison": lambda mask, n, x: torch.mm(mask.float(), torch.ones(5000, 1)).to(torch.bool),
}


@pytest.mark.parametrize("name", DECLINES)
def test_declines(name):
    gm = captured(DECLINES[name], MASK, FRAMES, X)
    products = {n for n in gm.graph.nodes if n.op == "call_function" and "mm" in str(n.target)}
    assert products and not products & lengths(gm.graph)


def test_integers_are_no_floating_values():
    gm = captured(lambda n: (n.float() * 2).long() + n, FRAMES)
    assert {n.meta["val"].dtype for n in lengths(gm.graph)} == {HIGH}
