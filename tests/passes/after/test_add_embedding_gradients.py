"""The gradient of a tied embedding is added where the other gradient lies: which sums, and with which numbers."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code

from ampcompile.passes.after.add_embedding_gradients import AddEmbeddingGradients
from tests.compiling import training_errors
from tests.models import Net
from tests.passes.tidied import tidied_joint, traced, words

aten = torch.ops.aten
OP = "torch.ops.ampcompile.add_embedding_gradient_"


def rows(grad, tokens, vocabulary=11, by_frequency=False):
    return aten.embedding_dense_backward(grad, tokens, vocabulary, 3, by_frequency)


def put(grad, tokens, vocabulary=11):
    """What torch makes of the same gradient on a GPU."""
    inside = ((tokens >= 0) & (tokens < vocabulary) & (tokens != 3)).unsqueeze(-1)
    zeros = aten.full([vocabulary, 8], 0, dtype=torch.float32, device=grad.device, pin_memory=False)
    return aten._unsafe_masked_index_put_accumulate(zeros, inside, [tokens], grad)


def product(x):
    return torch.mm(x.t(), x @ x.t())


# Of a spelling of the gradient, a gradient of 24 rows of 8 numbers, their tokens, and x of 8 x 11.
FIRES = {
    "a product": lambda r, g, i, x: product(x) + r(g, i),
    "on the left": lambda r, g, i, x: r(g, i) + product(x),
    "a widened product": lambda r, g, i, x: torch.mm(x.t().bfloat16(), (x @ x.t()).bfloat16()).float() + r(g, i),
    "two embeddings": lambda r, g, i, x: product(x) + r(g, i) + r(g.exp(), i.flip(0)),
    "two embeddings alone": lambda r, g, i, x: r(g, i) + r(g.exp(), i.flip(0)),
}
TRANSPOSED = lambda r, g, i, x: r(g, i) + torch.mm(x, x.t() @ x).t()
DECLINES = {
    "not added": lambda r, g, i, x: (r(g, i), x.exp()),
    "returned as well": lambda r, g, i, x: (y := r(g, i), y + x.t().exp().contiguous()),
    "added twice": lambda r, g, i, x: (y := r(g, i)) + y,
    "to an argument": lambda r, g, i, x: r(g, i, 6) + g[0],
    "to a number": lambda r, g, i, x: r(g, i) + 1,
    "to what others read": lambda r, g, i, x: (r(g, i) + (y := product(x)), y.sum()),
    "to what is broadcast": lambda r, g, i, x: r(g, i) + x.sum(1).exp(),
    "to an expanded view": lambda r, g, i, x: r(g, i) + x.sum(1).exp().expand(11, 8),
    "to a transposed view": lambda r, g, i, x: r(g, i) + x.exp().t(),
    "to another dtype": lambda r, g, i, x: r(g, i) + product(x).double(),
    "with a factor": lambda r, g, i, x: aten.add.Tensor(product(x), r(g, i), alpha=2),
    "by frequency": lambda r, g, i, x: product(x) + rows(g, i, by_frequency=True),
}


def arguments(tokens=(0, 11)):
    return torch.randn(4, 6, 8), torch.randint(*tokens, (4, 6)), torch.randn(8, 11)


@pytest.mark.parametrize("name", FIRES)
def test_our_op_adds_the_rows_on_the_cpu(name):
    gm, count = tidied_joint(functools.partial(FIRES[name], rows), AddEmbeddingGradients(), *arguments())
    found = words(gm).split()
    assert count == words(gm).count("auto_functionalized") == 1 + (name == "two embeddings")
    assert found.count("embedding_dense_backward") == (name == "two embeddings alone") and "add" not in found


@pytest.mark.parametrize("name", [*FIRES, "a transposed product"])
def test_rows_are_put_into_the_other_gradient_elsewhere(name):
    f = functools.partial(FIRES.get(name, TRANSPOSED), put)
    gm, count = tidied_joint(f, AddEmbeddingGradients(), *arguments((-2, 13)))
    assert count == words(gm).split().count("_unsafe_index_put") == 1 + (name == "two embeddings")


@pytest.mark.parametrize(
    ("name", "r"), [(name, r) for name in DECLINES for r in (rows, put) if r is rows or "view" not in name]
)
def test_declines(name, r):
    assert tidied_joint(functools.partial(DECLINES[name], r), AddEmbeddingGradients(), *arguments())[1] == 0


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_our_op_is_the_cpus_alone(device):
    f = functools.partial(FIRES["a product"], rows)
    assert AddEmbeddingGradients().apply(traced(f, *arguments(), device=device)) == 0


def tied(m, tokens, more):
    x = m.inner(m.tokens(tokens)) + m.tokens(more)
    return F.cross_entropy(F.linear(x, m.tokens.weight).flatten(0, 1), more.flatten())


@pytest.mark.ci
def test_a_tied_model_trains_and_nothing_is_copied():
    tokens, more = torch.randint(40, (2, 8, 12))
    tokens[:, :4] = 3
    model = Net(tied, tokens=nn.Embedding(40, 16, padding_idx=3), inner=nn.Linear(16, 16))
    eager, ours, _ = training_errors(model, lambda m, *xs: m(*xs), (tokens, more))
    assert ours <= 1.05 * eager
    run = torch.compile(copy.deepcopy(model), backend="amp")
    _, code = run_and_get_code(lambda: run(tokens, more).backward())
    backward = code[-1]
    assert backward.count(f"{OP}.default(") == 2 and "embedding_dense_backward(" not in backward
    assert "clone" not in backward.split("def call(")[1]
