"""What Inductor calls and what it takes apart, and that the gradients are right either way."""

import copy

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import nn

from ampcompile.compiler.inductor import EMBEDDING_BACKWARD, decompositions
from ampcompile.kernels.attention_backward import ATTENTION_BACKWARD, FLASH_BACKWARD, available
from ampcompile.passes.after.bind_weights import BindWeights
from ampcompile.torch_private import lowering
from tests.models import Net


def attending(m, tokens):
    x = m.tokens(tokens)
    q, k, v = m.qkv(x).unflatten(-1, (3, m.heads, -1)).permute(2, 0, 3, 1, 4)
    return (x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)).square().sum()


TOKENS = torch.empty(24, 7, dtype=torch.long)


@pytest.fixture(autouse=True)
def drawn() -> None:
    """Numbers of the test's own seed."""
    TOKENS.random_(11)
    TOKENS[:, 0] = 3


def gradients(model, run):
    return torch.autograd.grad(run(TOKENS), list(model.parameters()))


def called(monkeypatch, heads, **options):
    """A model, what is compiled of it, and the ops of the differentiated graph."""
    ops = []
    original = BindWeights.apply

    def watched(self, gm):
        ops.extend(node.target for node in gm.graph.nodes)
        return original(self, gm)

    monkeypatch.setattr(BindWeights, "apply", watched)
    model = Net(attending, heads=heads, tokens=nn.Embedding(11, 16, padding_idx=3), qkv=nn.Linear(16, 48))
    run = torch.compile(model, backend="amp", options=options)
    with torch._functorch.config.patch(enable_autograd_cache=False):  # what it holds isn't differentiated again
        gradients(model, run)
    return model, run, ops


@pytest.mark.parametrize("heads", [1, pytest.param(2, marks=pytest.mark.ci)], ids=["our kernel", "whole products"])
@pytest.mark.parametrize("numerics", ["eager", pytest.param("relaxed", marks=pytest.mark.ci)])
def test_gradients_are_as_exact_as_eager_autocasts(monkeypatch, numerics, heads):
    torch._dynamo.reset()
    model, run, ops = called(monkeypatch, heads, numerics=numerics)

    def autocast(tokens):
        with torch.autocast("cpu", torch.bfloat16):
            return model(tokens)

    totals = [0.0, 0.0]
    for _ in range(8):
        model.qkv.reset_parameters()
        exact_model = copy.deepcopy(model).double()
        exact = gradients(exact_model, exact_model)
        for i, each in enumerate((autocast, run)):
            found = gradients(model, each)
            totals[i] += sum(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))
    assert totals[1] <= 1.05 * totals[0]
    assert found[0][3].count_nonzero() == 0
    assert EMBEDDING_BACKWARD in ops
    assert FLASH_BACKWARD not in ops
    assert (ATTENTION_BACKWARD in ops) == (heads == 1 and available())


def test_other_devices_keep_inductors_own_choice():
    table, theirs = decompositions(), lowering.inductors_decompositions([])
    arguments = torch.zeros(2, 4, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta"), 5, -1, False
    assert table[EMBEDDING_BACKWARD](*arguments).shape == theirs[EMBEDDING_BACKWARD](*arguments).shape == (5, 4)


def normed(norm):
    """A norm behind a 16-bit result, as eager autocast leaves it: its weights are float32."""
    first, last = nn.Conv1d(6, 6, 1), nn.Conv1d(6, 6, 1)
    return Net(lambda m, x: m.last(m.norm(m.first(x))).square().mean(), first=first, norm=norm, last=last)


NORMS = {
    "layer": lambda: normed(nn.LayerNorm(9)),
    "group": lambda: normed(nn.GroupNorm(2, 6)),
    "batch": lambda: normed(nn.BatchNorm1d(6)),
}


@pytest.mark.parametrize("kind", ["layer", *(pytest.param(kind, marks=pytest.mark.ci) for kind in ("group", "batch"))])
@pytest.mark.parametrize("numerics", ["eager", pytest.param("relaxed", marks=pytest.mark.ci)])
def test_statistics_of_norms_stay_in_float32(kind, numerics):
    torch._dynamo.reset()
    model, totals = NORMS[kind](), [0.0, 0.0]
    run = torch.compile(model, backend="amp", options={"numerics": numerics})

    def autocast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    for _ in range(40):
        model.first.reset_parameters()
        model.last.reset_parameters()
        x, exact_model = torch.randn(7, 6, 9) + 3, copy.deepcopy(model).double()
        exact = torch.autograd.grad(exact_model(x.double()), exact_model.parameters())
        for i, each in enumerate((run, autocast)):
            found = torch.autograd.grad(each(x), model.parameters())
            totals[i] += sum(float((a.double() - b).norm()) for a, b in zip(found, exact, strict=True))
    assert totals[0] <= 1.08 * totals[1]
