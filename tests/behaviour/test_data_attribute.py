"""`.data` in compiled code: read, written and assigned, with the numbers and side effects of stock AOTAutograd."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from tests.compiling import LOW, eager, same_bits


def read(x, w):
    return x.data @ w + w.data.sum()


def written_item(x, w):
    v = x @ w
    v.data[0] = 5.0
    return v.relu()


def written_weight(x, w):
    y = x @ w
    w.data.mul_(0.5)
    return y + x @ w


def written_row(x, w):
    w.data[1:3].fill_(0.25)
    return F.linear(x, w)


def assigned(x, w):
    w.data = w.data * 0.5
    return x @ w


def moving_average(x, w, average):
    average.data = average.data * 0.9 + 0.1 * (x @ w).data.float()
    return x @ w - average


def codebook(x, w):
    """Vector quantization: the entries move toward what they stand for."""
    index = (x @ w.t()).argmax(1)
    hot = F.one_hot(index, len(w)).to(x.dtype)
    w.data.mul_(0.9).add_((hot.t() @ x).data, alpha=0.1)
    return x + (w[index] - x).detach()


def clamped(x, w):
    w.data.clamp_(-0.2, 0.2)
    return (x @ w).data.requires_grad_(False) * x.sum()


def in_a_checkpoint(x, w):
    def inner(x, w):
        return (x @ w) * w.data.mean()

    return torch.utils.checkpoint.checkpoint(inner, x, w, use_reentrant=False)


PROGRAMS = (read, written_item, written_weight, written_row, assigned, moving_average, codebook, clamped)
PROGRAMS += (in_a_checkpoint,)


def outcome(program, training, seeds=(0, 1, 2), **compiled):
    """What calls in turn give, and leave behind in the tensors they were given. No gradient counts as zero."""
    torch._dynamo.reset()
    run = torch.compile(program, **compiled)
    generator = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.randn(6, 6, generator=generator))
    more = [torch.zeros(4, 6)] if program is moving_average else []
    results = []
    for seed in seeds:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_(training)
        w.grad = None
        with torch.set_grad_enabled(training):
            y = run(x, w, *more)
        if y.requires_grad:
            y.float().square().sum().backward()
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in (x, w)]
        results.append([t.detach().clone() for t in (y, w, *gradients, *more)])
    return results


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("training", "lower"),
    [
        (True, "aot_eager"),
        (True, "eager"),
        (False, "aot_eager"),
        *(pytest.param(training, "inductor", marks=pytest.mark.slow) for training in (True, False)),
    ],
)
def test_numbers_and_side_effects_are_stock_aot_autograds(program, training, lower):
    with torch.autocast("cpu", LOW, cache_enabled=False):
        expected = outcome(program, training, backend="aot_eager")
    found = outcome(program, training, backend="amp", options={"lower": lower, "outputs": "autocast"})
    if lower == "aot_eager":
        assert same_bits(found, expected)
    for ours, theirs in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype and torch.allclose(ours.float(), theirs.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("lower", "write"), [("aot_eager", lambda w: w.data.mul_(-1)), ("eager", lambda w: w.data[0].add_(3.0))]
)
def test_what_compiled_code_writes_through_data_is_seen_by_other_graphs(lower, write):
    """The write raises no version: here as in stock AOTAutograd."""
    layer, x = nn.Linear(8, 8), torch.randn(3, 8)
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
    import ampcompile

    report = ampcompile.explain(lambda x, w: (x @ w, w.data.sum()), lower="aot_eager")(
        torch.randn(3, 4), nn.Parameter(torch.randn(4, 4))
    )
    assert any("hoisted" in cast.fate for cast in report.casts)


def test_of_what_a_graph_for_any_number_of_rows_writes_below_autograd_only_tensors_are_cast_again() -> None:
    def f(x, w):
        found = torch.einsum("ij,jk->ik", x, w)
        part = found[:]
        found.data.mul_(0.5)
        return part

    run = torch.compile(f, backend="amp", dynamic=True, options={"lower": "eager", "outputs": "autocast"})
    w = torch.randn(8, 8)
    for rows in (4, 6):
        x = torch.randn(rows, 8)
        with torch.autocast("cpu"):
            expected = f(x, w)
        assert torch.equal(run(x, w), expected)
