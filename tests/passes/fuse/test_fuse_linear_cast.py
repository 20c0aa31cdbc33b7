"""A weight's cast moves into its product: where, where not, what becomes of numbers, gradients, records."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampcompile
from ampcompile.kernels.linear_cast import LINEAR_CAST
from ampcompile.passes.base import run_passes
from ampcompile.passes.fuse.fuse_linear_cast import FuseLinearCast
from ampcompile.passes.fuse.matching import FusionCost, fusions
from tests.compiling import error
from tests.passes.rewriting import count, rewritten
from tests.passes.tidied import inserted, ours, results

pytestmark = pytest.mark.ci  # with default options nothing of it fires, or little

FUSE = FuseLinearCast(FusionCost("linear"), gradients=True)


def lora(x, w, a, b):
    return F.linear(x, w + 0.5 * (b @ a))


def weight_norm(x, v, g):
    return F.linear(x, torch._weight_norm(v, g, 0))


def ternary(x, w):
    scale = w.abs().mean()
    rounded = (w / scale).round().clamp(-1, 1) * scale
    return F.linear(x, w + (rounded - w).detach())


def checkpointed(x, w):
    return checkpoint(lambda x: x @ w.cos(), x, use_reentrant=False)


def matrix(*shape):
    return torch.randn(*shape)


def like(*shape):
    """What only lends its shape and dtype."""
    return torch.ones(*shape)


def in_order(f):
    """A graph's inputs stand in the order in which they are used."""
    return lambda *args: f(*(a.view(a.shape) for a in args))


FIRES = {
    "lora": (lora, (like(6, 20), like(9, 20), like(3, 20), like(9, 3)), 2),
    "weight norm": (weight_norm, (like(2, 6, 20), like(9, 20), like(9, 1)), 1),
    "ternary": (ternary, (like(6, 20), like(9, 20)), 1),
    "bias": (lambda x, w, b: F.linear(x, w * 2, b * 2), (like(6, 20), like(9, 20), like(9)), 1),
    "mm": (lambda x, w: torch.mm(x, w.cos()), (like(6, 20), like(20, 9)), 1),
    "matmul": (lambda x, w: x @ w.cos(), (like(2, 6, 20), like(20, 9)), 1),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w.cos().t()), (like(6, 20), like(9, 20), like(9)), 1),
    "weight first": (lambda x, w: (w.cos() @ x).view(-1), (like(20, 6), like(9, 20)), 1),
    "transposed": (lambda x, w: x @ w.cos().t(), (like(6, 20), like(9, 20)), 1),
    "views": (
        lambda x, w: x @ w.cos().view(4, 9, 20)[2].transpose(0, 1),
        (like(6, 20), like(36, 20)),
        1,
    ),
    "own casts": (lambda x, w: (x @ w.cos(), x @ w.cos()), (like(6, 20), like(20, 9)), 2),
    "an input": (lambda x, w: x @ w, (like(6, 20), like(20, 9)), 1),
    "square": (lambda x: x @ x, (like(8, 8),), 1),
    "checkpointed": (
        lambda x, w: checkpoint(lambda x: x @ w.cos(), x, use_reentrant=False),
        (like(6, 20), like(20, 9)),
        1,
    ),
}


def in_place(x, w):
    weight = w.cos()
    out = x @ weight
    weight.add_(1)
    return out, weight


DECLINES = {
    "the user's cast": (lambda x, w: x @ w.cos().bfloat16(), (like(6, 20).bfloat16(), like(20, 9))),
    "low already": (lambda x, w: x @ (w * 2), (like(6, 20), like(20, 9).bfloat16())),
    "written": (in_place, (like(6, 20), like(20, 9))),
    "batched": (lambda x, w: torch.bmm(x, w.cos()), (like(3, 6, 20), like(3, 20, 9))),
    "a batch of weights": (lambda x, w: x @ w.cos(), (like(6, 20), like(3, 20, 9))),
    "a vector": (lambda x, w: x @ w.cos(), (like(6, 20), like(20))),
    "added twice": (lambda x, w, b: torch.addmm(b, x, w.cos(), beta=2), (like(6, 20), like(20, 9), like(9))),
    "a matrix added": (lambda x, w, b: torch.addmm(b, x, w.cos()), (like(6, 20), like(20, 9), like(6, 9))),
    "copied first": (lambda x, w: x @ w.cos().t().bfloat16().contiguous(), (like(6, 20), like(9, 20))),
    "not by autocast": (lambda x, w: x + w.cos(), (like(6, 20), like(6, 20))),
}


@pytest.mark.parametrize("name", FIRES)
def test_fires_with_values_and_gradients_no_further_from_float64(name):
    f, args, expected = FIRES[name]
    f = in_order(f)
    gm = inserted(f, *args)
    original, casts = copy.deepcopy(gm), len(ours(gm))
    assert run_passes([FUSE], gm)[0].rewrites == expected
    assert count_of(gm) == expected and len(ours(gm)) <= casts - expected
    assert run_passes([FUSE], gm)[0].rewrites == 0, "idempotent"
    errors = []
    for _ in range(40):  # of a few numbers either may be nearer by chance
        args = [torch.randn_like(a) for a in args]
        unfused, fused = (results(copy.deepcopy(graph), args, gradients=True) for graph in (original, gm))
        exact = in_float64(f, args, unfused)
        assert [v is None or v.dtype for v in fused] == [v is None or v.dtype for v in unfused]
        found = [each for each in zip(fused, unfused, exact, strict=True) if each[0] is not None and each[2].norm() > 0]
        errors.append([(error([after], [best]), error([before], [best])) for after, before, best in found])
    for of_one in zip(*errors, strict=True):
        after, before = map(sum, zip(*of_one, strict=True))
        assert after <= 1.05 * before + 1e-6


def count_of(gm):
    return len(list(fusions(gm)))


def in_float64(f, args, like):
    """Values, inputs as left, gradients: as `results`."""
    inputs = [a.double().requires_grad_() for a in args]
    found = f(*inputs)
    values = list(found) if isinstance(found, tuple) else [found]
    generator = torch.Generator().manual_seed(0)
    dtypes = [known.dtype for known in like[: len(values)]]
    seeds = [torch.randn(v.shape, generator=generator).to(dtype) for v, dtype in zip(values, dtypes, strict=True)]
    torch.autograd.backward(values, [seed.double() for seed in seeds])
    return [*(v.detach() for v in values), *(i.detach() for i in inputs), *(i.grad for i in inputs)]


@pytest.mark.parametrize("name", DECLINES)
def test_declines(name):
    f, args = DECLINES[name]
    gm = inserted(f, *args)
    before = str(gm.graph)
    assert run_passes([FUSE], gm)[0].rewrites == 0 and str(gm.graph) == before


def test_a_cast_that_two_products_share_stays():
    from ampcompile.passes.before.share_casts import ShareCasts

    x, w = matrix(6, 20), matrix(20, 9)

    def f(x, w):
        weight = w.cos()
        return x @ weight, (x + 1) @ weight

    gm = inserted(f, x, w)
    run_passes([ShareCasts(gradients=False)], gm)
    assert run_passes([FUSE], gm)[0].rewrites == 0


class Merged(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = nn.Linear(24, 16), nn.Linear(24, 4, bias=False), nn.Linear(4, 16, bias=False)

    def forward(self, x):
        return F.linear(x, self.base.weight + self.b.weight @ self.a.weight, self.base.bias)


def test_a_hoisted_copy_stays_and_a_weight_cast_in_every_call_does_not():
    model, x = nn.Sequential(Merged(), nn.Linear(16, 8)), matrix(5, 24)
    (cached,) = rewritten(model, x, fuse="linear")
    assert count(cached, LINEAR_CAST) == 1 and count(cached, torch.ops.aten.linear.default) == 1
    (every_call,) = rewritten(model, x, fuse="linear", weights="every_call")
    assert count(every_call, LINEAR_CAST) == 3  # the product of the low-rank weights, too
    (neither,) = rewritten(model, x, fuse="linear_cross_entropy")
    assert count(neither, LINEAR_CAST) == 0


@pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.ci)])
def test_trains_compiled_and_the_report_says_so(lower):
    model, totals = Merged(), [0.0, 0.0]
    run = torch.compile(model, backend="amp", options={"outputs": "autocast", "fuse": "linear", "lower": lower})
    exact = copy.deepcopy(model).double()
    for _ in range(20):  # of a few numbers either may be nearer by chance
        x = matrix(5, 24)
        grads = torch.autograd.grad(run(x).float().square().sum(), list(model.parameters()))
        best = torch.autograd.grad(exact(x.double()).square().sum(), list(exact.parameters()))
        with torch.autocast("cpu", torch.bfloat16):
            eager = torch.autograd.grad(model(x).float().square().sum(), list(model.parameters()))
        totals = [total + error(values, best) for total, values in zip(totals, (grads, eager), strict=True)]
    assert 0 < totals[0] <= 1.02 * totals[1]
    report = ampcompile.explain(model, fuse="linear")(x)
    (fusion,) = report.fusions
    assert (fusion.family, fusion.op) == ("linear", "aten.linear")
    assert [cast.fate[-1] for cast in report.casts].count("fused") >= 1


def test_one_graph_for_every_number_of_rows():
    w = matrix(20, 9).requires_grad_()
    run = torch.compile(
        lambda x: x @ w.cos(),
        backend="amp",
        dynamic=True,
        options={"outputs": "autocast", "fuse": "linear", "lower": "aot_eager"},
    )
    for rows in (5, 7, 33):
        with torch._dynamo.config.patch(error_on_recompile=rows != 5):
            run(matrix(rows, 20)).sum().backward()


@pytest.mark.parametrize(
    ("f", "rows", "few"),
    [
        (lambda x, w: x @ w, 16, True),
        (lambda x, w: x @ w.t().t(), 1, True),
        (lambda x, w: x @ w, 17, False),  # bound by arithmetic
        (lambda x, w: x @ w.cos(), 16, False),  # Inductor computes the rounded weight in the loop of the cosine
    ],
)
def test_by_count_few_rows_pay_and_only_where_the_weight_lies_in_memory(f, rows, few):
    asked = []

    class Asked(FusionCost):
        def pays(self, device, saved, moved, freed=0):
            asked.append((saved, moved))
            return super().pays(torch.device("cuda"), saved, moved)

    gm = inserted(f, matrix(rows, 512), matrix(512, 512))
    assert run_passes([FuseLinearCast(Asked("auto"), gradients=False)], gm)[0].rewrites == few
    weight, rest = 512 * 512, 2 * 2 * rows * 512
    assert ((4 * weight, 8 * weight + rest) in asked) == few
    if few:
        (record,) = [record for _, record in fusions(gm)]
        assert record.saved == 4 * weight
