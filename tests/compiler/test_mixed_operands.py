"""Mixed floating operands never raise in a graph of ours, and change nothing anywhere else."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from ampcompile.dtypes import widest
from ampcompile.torch_private import dispatcher
from tests.compiling import HALF, HIGH, LOW, amp, dtypes, eager

INDEX, ROWS = torch.tensor([[0, 1], [1, 0]]), torch.tensor([1, 0])
MASK = torch.tensor([[True, False], [False, True]])

PROMOTING = {
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "where": lambda a, b: torch.where(MASK, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "lerp by tensor": lambda a, b: torch.lerp(a, b, a),
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b),
    "index_put": lambda a, b: torch.index_put(a, (ROWS,), b),
    "index_add": lambda a, b: torch.index_add(a, 0, ROWS, b),
    "index_copy": lambda a, b: torch.index_copy(a, 0, ROWS, b),
    "index_reduce": lambda a, b: torch.index_reduce(a, 0, ROWS, b, "mean"),
    "scatter": lambda a, b: torch.scatter(a, 0, INDEX, b),
    "scatter_add": lambda a, b: torch.scatter_add(a, 0, INDEX, b),
    "scatter_reduce": lambda a, b: torch.scatter_reduce(a, 0, INDEX, b, "sum"),
    "masked_scatter": lambda a, b: torch.masked_scatter(a, MASK, b),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "mv": lambda a, b: torch.mv(a, b[0]),
    "addmv": lambda a, b: torch.addmv(a[0], a, b[0]),
    "maximum": torch.maximum,
}


def setitem(a, b):
    a = a.clone()
    a[MASK] = b.flatten()[:2]
    a[:1] = b[:1]
    return a


WRITING = {
    "setitem": setitem,
    "copy_": lambda a, b: a.clone().copy_(b),
    "index_put_": lambda a, b: a.clone().index_put_((ROWS,), b),
    "index_add_": lambda a, b: a.clone().index_add_(0, ROWS, b),
    "index_copy_": lambda a, b: a.clone().index_copy_(0, ROWS, b),
    "scatter_": lambda a, b: a.clone().scatter_(0, INDEX, b),
    "scatter_add_": lambda a, b: a.clone().scatter_add_(0, INDEX, b),
    "scatter_reduce_": lambda a, b: a.clone().scatter_reduce_(0, INDEX, b, "sum"),
    "masked_scatter_": lambda a, b: a.clone().masked_scatter_(MASK, b),
    "lerp_": lambda a, b: a.clone().lerp_(b, 0.3),
    "addmm_": lambda a, b: a.clone().addmm_(b, b),
    "baddbmm_": lambda a, b: a[None].clone().baddbmm_(b[None], b[None]),
    "masked_fill_": lambda a, b: a.clone().masked_fill_(MASK, b.sum()),
    "add_": lambda a, b: a.clone().add_(b),
}


def each(a, b):
    return [f(a, b) for f in (*PROMOTING.values(), *WRITING.values())]


@pytest.mark.parametrize(
    ("first", "second", "mode"),
    [
        (HALF, LOW, torch.inference_mode),
        (LOW, HALF, torch.enable_grad),
        (HALF, HIGH, torch.inference_mode),
        (HALF, HALF, torch.no_grad),
        (HIGH, LOW, torch.no_grad),
    ],
)
def test_operands_promote_and_writers_convert_their_source(first, second, mode):
    a, b = ((torch.rand(2, 2) + 0.5).to(dtype) for dtype in (first, second))
    with mode():
        run, recorder = amp(each)
        check(run(a, b), each(a.double(), b.double()), first, second)
    assert not recorder.disagreements


def check(results, exact, first, second):
    """The results of PROMOTING and of WRITING have the dtypes and numbers that they should."""
    promoted = widest([first, second])
    assert dtypes(results) == [promoted] * len(PROMOTING) + [first] * len(WRITING)
    for name, result, expected in zip((*PROMOTING, *WRITING), results, exact, strict=True):
        assert torch.allclose(result.double(), expected, rtol=0.03, atol=0.03), name


DIFFERENTIATED = (
    PROMOTING
    | WRITING
    | {
        "cross": lambda a, b: torch.linalg.cross(F.pad(a, (0, 1)), F.pad(b, (0, 1))),
        "bilinear": lambda a, b: F.bilinear(a, b, a.new_ones(2, 2, 2)),
        "convolution": lambda a, b: F.conv1d(a[None], b[:, :, None]),
    }
)


@pytest.mark.parametrize(("first", "second"), [(LOW, HIGH), pytest.param(HIGH, LOW, marks=pytest.mark.ci)])
def test_gradients_reach_both_operands_in_their_own_dtypes(first, second):
    """Each op has operands of its own."""
    operands = [[(torch.rand(2, 2) + 0.5).to(dtype) for _ in DIFFERENTIATED] for dtype in (first, second)]
    given = [[x.requires_grad_() for x in each] for each in operands]
    exactly = [[x.detach().double().requires_grad_() for x in each] for each in operands]

    def every(firsts, seconds):
        return [f(a, b) for f, a, b in zip(DIFFERENTIATED.values(), firsts, seconds, strict=True)]

    run, recorder = amp(every)
    found, exact = run(*given), every(*exactly)
    assert not recorder.disagreements
    check(*(values[: len(PROMOTING) + len(WRITING)] for values in (found, exact)), first, second)
    upstream = [torch.randn_like(value) for value in exact]
    ours = torch.autograd.grad(
        found, [*given[0], *given[1]], [u.to(v.dtype) for u, v in zip(upstream, found, strict=True)]
    )
    theirs = torch.autograd.grad(exact, [*exactly[0], *exactly[1]], upstream, materialize_grads=True)
    assert dtypes(ours) == [first] * len(DIFFERENTIATED) + [second] * len(DIFFERENTIATED)
    for name, mine, other in zip(2 * [*DIFFERENTIATED], ours, theirs, strict=True):
        assert (mine - other).norm() <= 0.05 * other.norm() + 0.01, name


def test_attention_goes_low_and_a_floating_mask_follows_the_query():
    q, k, v = (torch.randn(1, 1, 3, 8) for _ in range(3))
    masks = torch.randn(3, 3), torch.randn(3, 3).to(LOW), torch.rand(3, 3) > 0.3
    cases = list(product([q, q.to(LOW), q.to(HALF)], masks))

    def attention(cases, k):
        return [F.scaled_dot_product_attention(query, k, v, attn_mask=mask) for query, mask in cases]

    results = amp(attention)[0](cases, k.to(LOW))
    wide = [(query.float(), mask.float() if mask.is_floating_point() else mask) for query, mask in cases]
    for result, exact in zip(results, attention(wide, k), strict=True):
        assert result.dtype == LOW and torch.allclose(result.float(), exact, atol=0.05)


# What becomes of an error on fake tensors: the second in torch 2.15, where it reaches Dynamo as the user's own would.
REFUSED = (torch._dynamo.exc.TorchRuntimeError, torch._dynamo.exc.Unsupported)


def scatter(a, b):
    return torch.scatter(a, 0, INDEX, b)


def test_eager_autocast_other_backends_and_disabled_regions_still_refuse():
    def disabled(a, b):
        with torch.autocast("cpu", enabled=False):
            return scatter(a, b)

    a, b = torch.rand(2, 2, dtype=LOW), torch.rand(2, 2)
    with pytest.raises(REFUSED, match=r"Expected self.dtype to be equal to src.dtype"):
        amp(disabled)[0](a, b)
    assert amp(scatter)[0](a, b).dtype == HIGH
    with pytest.raises(RuntimeError, match=r"Expected self.dtype to be equal to src.dtype"):
        eager(scatter, a, b)
    with pytest.raises(REFUSED):
        eager(torch.compile(scatter, backend="aot_eager"), a, b)
    assert not dispatcher.has_autocast_kernel("aten::scatter.src", "cpu")
    with pytest.raises(RuntimeError, match="prioritize"):
        eager(torch.cat, [a.to(HALF), b])
