"""What Inductor calls and what it takes apart, and that the gradients are right either way."""

import copy
from functools import partial

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import nn

from ampcompile.compiler.inductor import EMBEDDING_BACKWARD, decompositions
from ampcompile.kernels.attention_backward import ATTENTION_BACKWARD, FLASH_BACKWARD, available
from ampcompile.passes.after.bind_weights import BindWeights
from ampcompile.torch_private import lowering
from tests.compiling import eager
from tests.models import Net


def attending(m, tokens):
    x = m.tokens(tokens)
    q, k, v = m.qkv(x).unflatten(-1, (3, m.heads, -1)).permute(2, 0, 3, 1, 4)
    return (x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)).square().sum()


def watched(monkeypatch, run):
    """The ops of the differentiated graph of what is compiled and called first by `run`."""
    ops = []
    original = BindWeights.apply

    def apply(self, gm):
        ops.extend(node.target for node in gm.graph.nodes)
        return original(self, gm)

    with monkeypatch.context() as patched, torch._functorch.config.patch(enable_autograd_cache=False):
        patched.setattr(BindWeights, "apply", apply)  # what the cache holds isn't differentiated again
        run()
    return ops


def gradients(run, models, x):
    """Of each model, whose results are computed together."""
    found = iter(torch.autograd.grad(sum(run(x)), [*models.parameters()]))
    return [[next(found) for _ in m.parameters()] for m in models]


def errors(compiled, models, redrawn, inputs, relative):
    """By model, amp's and eager autocast's errors against float64, summed over inputs and weights of some layers."""
    totals = torch.zeros(len(models), 2)
    for x in inputs:
        for layer in redrawn:
            layer.reset_parameters()
        exactly = copy.deepcopy(models).double()
        exact = gradients(partial(each, exactly), exactly, x.double() if x.is_floating_point() else x)
        for i, run in enumerate((compiled, partial(eager, partial(each, models)))):
            for total, found, best in zip(totals, gradients(run, models, x), exact, strict=True):
                norms = [((a.double() - b).norm(), b.norm()) for a, b in zip(found, best, strict=True)]
                total[i] += sum(error / norm if relative else error for error, norm in norms)
    return totals.unbind(1)


def each(models, x):
    return [m(x) for m in models]


@pytest.mark.parametrize("numerics", ["eager", pytest.param("relaxed", marks=pytest.mark.ci)])
def test_gradients_are_as_exact_as_eager_autocasts(monkeypatch, numerics):
    """Of attention with one head, for which we have a kernel, and with two, whose products are whole ones."""
    tokens = torch.randint(11, (24, 7))
    tokens[:, 0] = 3
    models = nn.ModuleList(
        Net(attending, heads=heads, tokens=nn.Embedding(11, 16, padding_idx=3), qkv=nn.Linear(16, 48))
        for heads in (1, 2)
    )
    run = torch.compile(lambda x: each(models, x), backend="amp", options={"numerics": numerics})
    ops = watched(monkeypatch, lambda: gradients(run, models, tokens))
    ours, eagers = errors(run, models, [m.qkv for m in models], [tokens] * 8, relative=True)
    assert (ours <= 1.05 * eagers).all()
    assert all(found[0][3].count_nonzero() == 0 for found in gradients(run, models, tokens))
    assert EMBEDDING_BACKWARD in ops and FLASH_BACKWARD not in ops
    assert ops.count(ATTENTION_BACKWARD) == available()


def test_other_devices_keep_inductors_own_choice():
    table, theirs = decompositions(), lowering.inductors_decompositions([])
    arguments = torch.zeros(2, 4, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta"), 5, -1, False
    assert table[EMBEDDING_BACKWARD](*arguments).shape == theirs[EMBEDDING_BACKWARD](*arguments).shape == (5, 4)


def normed(norm):
    """A norm behind a 16-bit result, as eager autocast leaves it: its weights are float32."""
    first, last = nn.Conv1d(6, 6, 1), nn.Conv1d(6, 6, 1)
    return Net(lambda m, x: m.last(m.norm(m.first(x))).square().mean(), first=first, norm=norm, last=last)


@pytest.mark.ci
@pytest.mark.parametrize("numerics", ["eager", "relaxed"])
def test_statistics_of_norms_stay_in_float32(numerics):
    models = nn.ModuleList(map(normed, (nn.LayerNorm(9), nn.GroupNorm(2, 6), nn.BatchNorm1d(6))))
    run = torch.compile(lambda x: each(models, x), backend="amp", options={"numerics": numerics})
    layers = [layer for m in models for layer in (m.first, m.last)]
    ours, eagers = errors(run, models, layers, [torch.randn(7, 6, 9) + 3 for _ in range(40)], relative=False)
    assert (ours <= 1.08 * eagers).all()
