"""Softmax in one kernel with its scale, mask and casts: where, where not, and what becomes of numbers and gradients."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.kernels.softmax import SOFTMAX
from ampcompile.passes.base import run_passes
from ampcompile.passes.fuse.fuse_softmax import FuseSoftmax
from ampcompile.passes.fuse.matching import Worth, fusions
from tests import tiny_models
from tests.compiling import HIGH, LOW, amp, error
from tests.passes.rewriting import count, rewritten
from tests.passes.tidied import inserted, results

FUSE = FuseSoftmax(Worth("softmax"))
Q, K = torch.randn(2, 3, 9, 16), torch.randn(2, 3, 16, 11)
BIAS = torch.randn(3, 1, 11)
CHOSEN = torch.rand(2, 1, 9, 11) < 0.3
CHOSEN[..., 0] = False
GIVEN = Q, K, BIAS, CHOSEN


def to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast, but none in the run that all are held against."""
    return value if value.dtype is torch.float64 else value.to(dtype)


def plain(q, k, bias, chosen):
    return torch.softmax(q @ k, -1) @ k.mT


def in_float32(q, k, bias, chosen):
    scores = (q @ k) * 0.25 + bias
    return to(torch.softmax(to(scores, HIGH), dim=-1), LOW) @ k.mT


def mask_first(q, k, bias, chosen):
    return torch.softmax(bias + 0.3 * to(q @ k, HIGH), 3) @ k.mT


def filled(q, k, bias, chosen):
    return torch.softmax(((q @ k) / 4.0).masked_fill(chosen, -1e9), -1) @ k.mT


def kept(q, k, bias, chosen):
    return to(torch.where(~chosen, q @ k, -torch.inf), HIGH).softmax(-1) @ k.mT


def chosen_away(q, k, bias, chosen):
    return torch.where(chosen, -torch.inf, q @ k).softmax(-1)


def asked_for_float32(q, k, bias, chosen):
    scores = q @ k
    return torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, HIGH)), scores


def scaled_otherwise(q, k, bias, chosen):
    scale = q.amax()
    return torch.softmax((q @ k) * scale, -1) @ k.mT


def another_layout(q, k, bias, chosen):
    return torch.softmax((q @ k).transpose(1, 2), -1)


def checkpointed(q, k, bias, chosen):
    return torch.utils.checkpoint.checkpoint(in_float32, q, k, bias, chosen, use_reentrant=False)


FIRES = [
    plain,
    in_float32,
    mask_first,
    filled,
    kept,
    chosen_away,
    asked_for_float32,
    scaled_otherwise,
    another_layout,
    checkpointed,
]


def in_order(f: Any) -> Any:
    """A graph's inputs stand in the order in which they are used."""
    return lambda *args: f(*(a.view(a.shape) for a in args))


def in_float64(f: Any, args: tuple[Tensor, ...], like: list[Any]) -> list[Any]:
    """Values, inputs as left, gradients: as `results`."""
    inputs = [a.double().requires_grad_() if a.is_floating_point() else a for a in args]
    found = f(*inputs)
    values = list(found) if isinstance(found, tuple) else [found]
    generator = torch.Generator().manual_seed(0)
    seeds = [torch.randn(v.shape, generator=generator).to(known.dtype) for v, known in zip(values, like, strict=False)]
    torch.autograd.backward(values, [seed.double() for seed in seeds])
    return [*(v.detach() for v in values), *(i.detach().double() for i in inputs), *(i.grad for i in inputs)]


@pytest.mark.parametrize("f", FIRES, ids=lambda f: f.__name__)
def test_fires_with_values_and_gradients_no_further_from_float64(f: Any) -> None:
    f, totals = in_order(f), [0.0, 0.0]
    unfused = inserted(f, *GIVEN)
    fused = copy.deepcopy(unfused)
    assert run_passes([FUSE], fused)[0].rewrites == 1
    (record,) = [record for _, record in fusions(fused)]
    assert (record.family, record.op) == ("softmax", "aten.softmax")
    assert run_passes([FUSE], fused)[0].rewrites == 0, "idempotent"
    for _ in range(12):
        args = (*map(torch.randn_like, (Q, K, BIAS)), CHOSEN)
        before, after = (results(graph, args, gradients=True) for graph in (unfused, fused))
        exact = in_float64(f, args, before)
        for a, b in zip(after, before, strict=True):
            assert (a is None) == (b is None) and (a is None or a.dtype == b.dtype)
        read = [best if a is not None else None for a, best in zip(after, exact, strict=True)]
        totals[0] += error(after, read)
        totals[1] += error(before, read)
    assert totals[0] <= 1.05 * totals[1] + 1e-6


def fused(f: Any) -> tuple[Any, ...]:
    """What the one fused op is called with: scale, fill, keep, what is rounded, type; and its two tensors."""
    gm = inserted(in_order(f), *GIVEN)
    assert run_passes([FUSE], gm)[0].rewrites == 1
    (call,) = gm.graph.find_nodes(op="call_function", target=SOFTMAX)
    x, mask, *kinds = call.args
    assert x.target is torch.ops.aten.matmul.default
    return *kinds, mask is not None


def test_what_the_kernel_gets() -> None:
    assert fused(plain) == (1.0, None, False, False, False, LOW, False)
    assert fused(in_float32) == (0.25, None, False, True, False, LOW, True)
    assert fused(mask_first) == (0.3, None, False, False, False, LOW, True)
    rounded = torch.tensor(-1e9, dtype=LOW).item()
    assert fused(filled) == (0.25, rounded, False, True, False, LOW, True)
    assert fused(kept) == (1.0, -torch.inf, True, False, False, LOW, True)
    assert fused(chosen_away) == (1.0, -torch.inf, False, False, False, LOW, True)
    assert fused(asked_for_float32)[5] is HIGH


def another_dimension(q, k, bias, chosen):
    return torch.softmax(q @ k, 2) @ k.mT


def nothing_low(q, k, bias, chosen):
    return torch.softmax(q, -1) + 1


def written(q, k, bias, chosen):
    share = torch.softmax(q @ k, -1)
    out = share @ k.mT
    share.add_(1)
    return out, share


def asked_for_float64(q, k, bias, chosen):
    return torch.softmax(q @ k, -1, dtype=torch.float64)


def constant_scores(q, k, bias, chosen):
    with torch.no_grad():
        scores = (q @ k) * 0.25
    return torch.softmax(scores, -1) @ k.mT


DECLINES = [constant_scores, another_dimension, nothing_low, written, asked_for_float64]


@pytest.mark.parametrize("f", DECLINES, ids=lambda f: f.__name__)
def test_declines(f: Any) -> None:
    gm = inserted(in_order(f), *GIVEN)
    before = str(gm.graph)
    assert run_passes([FUSE], gm)[0].rewrites == 0 and str(gm.graph) == before


def test_what_others_read_stays() -> None:
    def scaled(q, k, bias, chosen):
        scores = (q @ k) * 0.25
        return torch.softmax(scores + bias, -1) @ k.mT, scores

    gm = inserted(in_order(scaled), *GIVEN)
    assert run_passes([FUSE], gm)[0].rewrites == 1
    (call,) = gm.graph.find_nodes(op="call_function", target=SOFTMAX)
    assert call.args[0].target is torch.ops.aten.mul.Tensor and call.args[2] == 1.0


# T5 adds a position bias and then a mask, of which one is folded: what is left is float32, and so is dropout behind it.
COUNTS = {"llama": 2, "gpt2": 2, "bert": 2, "vit": 2, "t5": 2}


@pytest.mark.parametrize("name", tiny_models.FUSED_ON)
def test_fires_on_architectures(name: str) -> None:
    """Written out, as transformers does it where attention is asked to be "eager"."""
    pytest.importorskip("transformers")
    model, inputs = tiny_models.build(name)
    model.set_attn_implementation("eager")
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}

    def gradients(model: nn.Module, inputs: dict[str, Tensor], run: Any) -> list[Any]:
        return list(torch.autograd.grad(run(model, inputs), list(model.parameters()), allow_unused=True))

    exact = gradients(copy.deepcopy(model).double(), wide, tiny_models.loss)
    with torch.autocast("cpu", LOW):
        eager = gradients(model, inputs, tiny_models.loss)
    run, recorder = amp(lambda: tiny_models.loss(model, inputs), fuse="softmax")
    found = gradients(model, inputs, lambda *_: run())
    assert sum(count(graph, SOFTMAX) for graph in recorder.graphs) == COUNTS[name]
    assert error(found, exact) <= 1.05 * error(eager, exact)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.softmax((q @ k.mT) * 0.25 + mask, -1) @ v


@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
def test_trains_compiled_and_the_report_says_so(lower: str) -> None:
    model, x, mask = Attention(), torch.randn(3, 9, 16), torch.randn(9, 9).triu(1) * -1e4
    run = torch.compile(model, backend="amp", options={"outputs": "autocast", "fuse": "softmax", "lower": lower})
    grads = torch.autograd.grad(run(x, mask).float().square().sum(), list(model.parameters()))
    exact = copy.deepcopy(model).double()
    best = torch.autograd.grad(exact(x.double(), mask.double()).square().sum(), list(exact.parameters()))
    with torch.autocast("cpu", LOW):
        eager = torch.autograd.grad(model(x, mask).float().square().sum(), list(model.parameters()))
    assert error(grads, best) <= 1.02 * error(eager, best)
    (fusion,) = ampcompile.explain(model, fuse="softmax")(x, mask).fusions
    assert (fusion.family, fusion.op) == ("softmax", "aten.softmax")


def test_nothing_is_fused_unless_asked_for() -> None:
    for fuse in ("auto", "none", "norm"):
        (graph,) = rewritten(Attention(), torch.randn(3, 9, 16), torch.zeros(9, 9), fuse=fuse)
        assert count(graph, SOFTMAX) == 0
        torch._dynamo.reset()
    assert not FuseSoftmax(Worth("auto")).worth(torch.device("cuda"), 0, 0)


def test_one_graph_for_every_size() -> None:
    model = Attention()
    run = torch.compile(
        model, backend="amp", dynamic=True, options={"outputs": "autocast", "fuse": "softmax", "lower": "aot_eager"}
    )
    for rows in (5, 7, 33):
        with torch._dynamo.config.patch(error_on_recompile=rows != 5):
            run(torch.randn(3, rows, 16), torch.zeros(rows, rows)).float().sum().backward()
