"""The gradient of a tied embedding is added where the other gradient lies: which sums, and with which numbers."""

import copy
import functools
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompile.passes.after.add_embedding_gradients import AddEmbeddingGradients
from ampcompile.torch_private.dispatcher import AS_A_FUNCTION
from tests.compiling import training_errors
from tests.models import Net

aten = torch.ops.aten
OP = "torch.ops.ampcompile.add_embedding_gradient_"


def rows(grad, tokens, vocabulary=11, by_frequency=False):
    return aten.embedding_dense_backward(grad, tokens, vocabulary, 3, by_frequency)


def joint(f, device="cpu") -> GraphModule:
    """The graph of `f(grad, tokens, x)`: 24 gradients of 8 numbers, x of 8 x 11."""
    with FakeTensorMode():
        tokens = torch.empty(4, 6, dtype=torch.int64, device=device)
        return make_fx(f)(torch.empty(4, 6, 8, device=device), tokens, torch.empty(8, 11, device=device))


def put(grad, tokens, vocabulary=11):
    """What torch makes of the same gradient on a GPU."""
    inside = ((tokens >= 0) & (tokens < vocabulary) & (tokens != 3)).unsqueeze(-1)
    zeros = aten.full([vocabulary, 8], 0, dtype=torch.float32, device=grad.device, pin_memory=False)
    return aten._unsafe_masked_index_put_accumulate(zeros, inside, [tokens], grad)


FIRES = {  # of a spelling of the gradient: how often
    "a product": (1, lambda r, g, i, x: torch.mm(x.t(), x @ x.t()) + r(g, i)),
    "on the left": (1, lambda r, g, i, x: r(g, i) + torch.mm(x.t(), x @ x.t())),
    "a widened product": (1, lambda r, g, i, x: torch.mm(x.t().bfloat16(), (x @ x.t()).bfloat16()).float() + r(g, i)),
    "two embeddings": (2, lambda r, g, i, x: torch.mm(x.t(), x @ x.t()) + r(g, i) + r(g.exp(), i.flip(0))),
    "two embeddings alone": (1, lambda r, g, i, x: r(g, i) + r(g.exp(), i.flip(0))),
}
PUT = {"a transposed product": (1, lambda r, g, i, x: r(g, i) + torch.mm(x, x.t() @ x).t())}


@pytest.mark.parametrize(("name", "r"), [*product(FIRES, [rows, put]), ("a transposed product", put)])
def test_fires(name, r):
    count, spelled = (FIRES | PUT)[name]
    f = functools.partial(spelled, r)
    gm = joint(f)
    (before,) = (node.meta["val"] for node in gm.graph.output_node().all_input_nodes)
    assert AddEmbeddingGradients().apply(gm) == count
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    if r is rows:
        assert len(gm.graph.find_nodes(op="call_function", target=AS_A_FUNCTION)) == count
        left = sum(node.target in (aten.add.Tensor, aten.embedding_dense_backward.default) for node in gm.graph.nodes)
        assert left == (name == "two embeddings alone")
        (after,) = (node.meta["val"] for node in gm.graph.output_node().all_input_nodes)
        assert (after.dtype, after.shape, after.stride()) == (before.dtype, before.shape, before.stride())
    tokens = torch.randint(11, (4, 6)) if r is rows else torch.randint(-2, 13, (4, 6))
    arguments = torch.randn(4, 6, 8), tokens, torch.randn(8, 11)
    torch.testing.assert_close(gm(*arguments), f(*arguments))
    assert AddEmbeddingGradients().apply(gm) == 0


DECLINES = {
    "not added": lambda r, g, i, x: (r(g, i), x.exp()),
    "returned as well": lambda r, g, i, x: (y := r(g, i), y + x.t().exp().contiguous()),
    "added twice": lambda r, g, i, x: (y := r(g, i)) + y,
    "to an argument": lambda r, g, i, x: r(g, i, 6) + g[0],
    "to a number": lambda r, g, i, x: r(g, i) + 1,
    "to what others read": lambda r, g, i, x: (r(g, i) + (y := torch.mm(x.t(), x @ x.t())), y.sum()),
    "to what is broadcast": lambda r, g, i, x: r(g, i) + x.sum(1).exp(),
    "to an expanded view": lambda r, g, i, x: r(g, i) + x.sum(1).exp().expand(11, 8),
    "to a transposed view": lambda r, g, i, x: r(g, i) + x.exp().t(),
    "to another dtype": lambda r, g, i, x: r(g, i) + torch.mm(x.t(), x @ x.t()).double(),
    "with a factor": lambda r, g, i, x: aten.add.Tensor(torch.mm(x.t(), x @ x.t()), r(g, i), alpha=2),
    "by frequency": lambda r, g, i, x: torch.mm(x.t(), x @ x.t()) + rows(g, i, by_frequency=True),
}


@pytest.mark.parametrize(
    ("name", "r"), [(name, r) for name in DECLINES for r in (rows, put) if r is rows or "view" not in name]
)
def test_declines(name, r):
    gm = joint(functools.partial(DECLINES[name], r))
    before = str(gm.graph)
    assert AddEmbeddingGradients().apply(gm) == 0 and str(gm.graph) == before


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_declines_on_other_devices(device):
    assert AddEmbeddingGradients().apply(joint(functools.partial(FIRES["a product"][1], rows), device)) == 0


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
