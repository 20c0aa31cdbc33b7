"""Norms in one kernel with what stands around them: where, where not, and what becomes of numbers and gradients."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampcompile
from ampcompile.kernels.norm import COPIED, NORM
from ampcompile.passes.after.drop_casts import DropCasts
from ampcompile.passes.base import run_passes
from ampcompile.passes.fuse.fuse_norm import FuseNorm
from ampcompile.passes.fuse.matching import FusionCost, fusions
from tests import tiny_models
from tests.compiling import HIGH, LOW, amp, error, training_errors
from tests.passes.rewriting import count, rewritten
from tests.passes.tidied import inserted, ours, results

pytestmark = pytest.mark.ci  # with default options nothing of it fires, or little

FUSE = FuseNorm(FusionCost("norm"))
X, W, V, B = torch.empty(6, 5, 32), torch.empty(32, 32), torch.empty(32), torch.empty(32)


@pytest.fixture(autouse=True)
def drawn() -> None:
    """Numbers of the test's own seed."""
    for value in (X, V, B):
        value.normal_()
    W.normal_(std=1 / 6)


def to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast, but none in the run that all are held against."""
    return value if value.dtype is torch.float64 else value.to(dtype)


def layer(x, w, v, b):
    return F.layer_norm(x, (32,), v, b) @ w


def residual(x, w, v, b):
    h = x + x @ w
    return h, F.layer_norm(h, (32,), v, b) @ w


def residual_of_low(x, w, v, b):
    h = x @ w + (x + 1) @ w
    return F.layer_norm(to(h, HIGH), (32,), v, b) @ w


def several(x, w, v, b):
    y = F.layer_norm(x, (32,), v, b)
    return y @ w, y @ w.t(), y.view(-1, 32) @ w, y + 1


def mixed(x, w, v, b):
    return F.layer_norm(x @ w, (32,), v, b)


def rms(x, w, v, b):
    return F.rms_norm(x, (32,), v, 1e-6) @ w


def by_hand(x, w, v, b):
    h = (x @ w) + x
    wide = to(h, HIGH)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return h, (v * to(wide, h.dtype)) @ w


def by_hand_of_low(x, w, v, b):
    h = x @ w
    wide = to(h, HIGH)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (v * to(wide, LOW)) @ w


def by_hand_otherwise(x, w, v, b):
    h = x.transpose(0, 1).contiguous()
    return ((torch.rsqrt((h * h).mean(2, True) + 1e-6) * h) * (1 + v)) @ w


def two_dimensions(x, w, v, b):
    return F.layer_norm(x, (5, 32)) @ w


def checkpointed(x, w, v, b):
    return torch.utils.checkpoint.checkpoint(layer, x, w, v, b, use_reentrant=False)


FIRES = [
    layer,
    residual,
    residual_of_low,
    several,
    mixed,
    rms,
    by_hand,
    by_hand_of_low,
    by_hand_otherwise,
    two_dimensions,
    checkpointed,
]


def in_order(f: Any) -> Any:
    """A graph's inputs stand in the order in which they are used."""
    return lambda *args: f(*(a.view(a.shape) for a in args))


def in_float64(f: Any, args: tuple[Tensor, ...], like: list[Any]) -> list[Any]:
    """Values, inputs as left, gradients: as `results`."""
    inputs = [a.double().requires_grad_() for a in args]
    found = f(*inputs)
    values = list(found) if isinstance(found, tuple) else [found]
    generator = torch.Generator().manual_seed(0)
    dtypes = [known.dtype for known in like[: len(values)]]
    seeds = [torch.randn(v.shape, generator=generator).to(dtype) for v, dtype in zip(values, dtypes, strict=True)]
    torch.autograd.backward(values, [seed.double() for seed in seeds])
    return [*(v.detach() for v in values), *(i.detach() for i in inputs), *(i.grad for i in inputs)]


@pytest.mark.parametrize("f", FIRES, ids=lambda f: f.__name__)
def test_fires_with_values_and_gradients_no_further_from_float64(f: Any) -> None:
    f, totals = in_order(f), [0.0, 0.0]
    unfused = inserted(f, X, W, V, B)
    fused = copy.deepcopy(unfused)
    assert run_passes([FUSE], fused)[0].rewrites == 1
    (record,) = [record for _, record in fusions(fused)]
    assert record.family == "norm"
    assert run_passes([FUSE], fused)[0].rewrites == 0, "idempotent"
    for _ in range(12):
        args = tuple(torch.randn_like(a) * a.std() for a in (X, W, V, B))
        before, after = (results(graph, args, gradients=True) for graph in (unfused, fused))
        exact = in_float64(f, args, before)
        for a, b in zip(after, before, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.dtype, a.stride()) == (b.dtype, b.stride())
        read = [best if a is not None else None for a, best in zip(after, exact, strict=True)]
        totals[0] += error(after, read)
        totals[1] += error(before, read)
    assert totals[0] <= 1.05 * totals[1] + 1e-6


def fused(f: Any, *args: Tensor) -> tuple[Any, ...]:
    """The arguments of the one fused op."""
    gm = inserted(f, *args)
    assert run_passes([FUSE], gm)[0].rewrites == 1
    (call,) = gm.graph.find_nodes(op="call_function", target=NORM)
    return call.args


def test_what_the_kernel_gets_and_gives() -> None:
    x, added, *_, inner, wide, low, lows = fused(residual, X, W, V, B)
    assert added is not None and (inner, wide, low, lows) == (False, False, LOW, 1)
    x, added, *_, inner, wide, low, lows = fused(residual_of_low, X, W, V, B)
    assert x.meta["val"].dtype == added.meta["val"].dtype == LOW
    assert fused(several, X, W, V, B)[-3:] == (True, LOW, 3)
    assert fused(mixed, X, W, V, B)[-3:] == (False, LOW, 1)
    assert fused(by_hand_of_low, X, W, V, B)[7:] == (True, False, LOW, 1)
    assert fused(by_hand, X, W, V, B)[7] is False  # a cast to the type that it has


def test_no_cast_is_left_between_the_products() -> None:
    gm = inserted(lambda x, w, v, b: layer(x @ w, w, v, b), X, W, V, B)
    run_passes([FUSE], gm)
    assert [cast.args[0].op for cast in ours(gm)] == ["placeholder"] * 3


def written(x, w, v, b):
    y = F.layer_norm(x, (32,), v, b)
    out = y @ w
    y.add_(1)
    return out, y


def nothing_low(x, w, v, b):
    return F.layer_norm(x, (32,), v, b) + 1


def users_cast(x, w, v, b):
    return F.layer_norm(x, (32,), v, b).to(LOW)


def another_layout(x, w, v, b):
    h = x.transpose(0, 1)
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)) @ w


def in_16_bits(x, w, v, b):
    h = x @ w
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)) @ w


def variance_is_read(x, w, v, b):
    square = x.pow(2).mean(-1, keepdim=True)
    return (x * torch.rsqrt(square + 1e-6)) @ w, square


def another_power(x, w, v, b):
    return (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6)) @ w


def another_dimension(x, w, v, b):
    return (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)) @ w


def another_value(x, w, v, b):
    return ((x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) @ w


def in_float64_itself(x, w, v, b):
    return F.layer_norm(x.double(), (32,)).float() @ w


def constant_variance(x, w, v, b):
    with torch.no_grad():
        share = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (x * share) @ w


DECLINES = [
    constant_variance,
    written,
    nothing_low,
    users_cast,
    another_layout,
    in_16_bits,
    variance_is_read,
    another_power,
    another_dimension,
    another_value,
    in_float64_itself,
]


@pytest.mark.parametrize("f", DECLINES, ids=lambda f: f.__name__)
def test_declines(f: Any) -> None:
    gm = inserted(in_order(f), X, W, V, B)
    before = str(gm.graph)
    assert run_passes([FUSE], gm)[0].rewrites == 0 and str(gm.graph) == before


def test_a_sum_that_is_read_before_the_norm_stays() -> None:
    def f(x, w, v, b):
        h = x + x @ w
        scaled = b * 2
        early = h * scaled
        return F.layer_norm(h, (32,), v, early[0, 0]) @ w

    x, added, *_ = fused(in_order(f), X, W, V, B)
    assert added is None and x.target is torch.ops.aten.add.Tensor


def test_a_sum_without_a_gradient_stays() -> None:
    def f(x, w, v, b):
        with torch.no_grad():
            h = x + x @ w
        return F.layer_norm(h, (32,), v, b) @ w

    assert fused(f, X, W, V, B)[1] is None


def test_a_sum_that_broadcasts_stays() -> None:
    assert fused(lambda x, w, v, b: F.layer_norm(x + b, (32,), v) @ w, X, W, V, B)[1] is None


COUNTS = {"llama": 5, "gpt2": 5, "bert": 5, "vit": 5, "t5": 12}


def test_a_sum_with_integers_stays() -> None:
    positions = torch.arange(32).expand(6, 5, 32).contiguous()
    _, added, *_ = fused(lambda x, w, v, b, p: layer(x + p, w, v, b), X, W, V, B, positions)
    assert added is None


@pytest.mark.parametrize("name", tiny_models.FUSED_ON)
def test_fires_on_architectures(name: str) -> None:
    """Every norm but BERT's first, which stands between float32 and dropout."""
    pytest.importorskip("transformers")
    model, inputs = tiny_models.build(name)

    def loss(model: nn.Module, *values: Tensor) -> Tensor:
        return tiny_models.loss(model, dict(zip(inputs, values, strict=True)))

    eager, found, recorder = training_errors(model, loss, [*inputs.values()], fuse="norm")
    assert sum(count(graph, NORM) for graph in recorder.graphs) == COUNTS[name]
    assert found <= 1.05 * eager


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.q(x)
        y = self.norm(h)
        return self.q(y) * self.k(y) + h


@pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.ci)])
def test_trains_compiled_and_the_report_says_so(lower: str) -> None:
    model, x = Block(), torch.randn(9, 32)
    eager, found, _ = training_errors(model, lambda m, x: m(x).square().sum(), [x], fuse="norm", lower=lower)
    assert found <= 1.02 * eager
    report = ampcompile.explain(model, fuse="norm")(x)
    (fusion,) = report.fusions
    assert (fusion.family, fusion.op, fusion.module) == ("norm", "aten.layer_norm", "norm")
    assert [cast.fate[-1] for cast in report.casts].count("fused") == 2


def test_readers_share_one_tensor_after_differentiation(monkeypatch: pytest.MonkeyPatch) -> None:
    left = []
    original = DropCasts.apply

    def watched(self: DropCasts, gm: torch.fx.GraphModule) -> int:
        left.append(len(gm.graph.find_nodes(op="call_function", target=COPIED)))
        return original(self, gm)

    monkeypatch.setattr(DropCasts, "apply", watched)
    amp(Block(), fuse="norm")[0](torch.randn(9, 32)).sum().backward()
    assert left == [0]


def test_nothing_is_fused_unless_asked_for() -> None:
    for fuse in ("auto", "none", "linear"):
        (graph,) = rewritten(Block(), torch.randn(9, 32), fuse=fuse)
        assert count(graph, NORM) == 0
        torch._dynamo.reset()
    assert not FuseNorm(FusionCost("auto")).cost.pays(torch.device("cuda"), 0, 0)


def test_one_graph_for_every_number_of_rows() -> None:
    model = Block()
    run = torch.compile(
        model, backend="amp", dynamic=True, options={"outputs": "autocast", "fuse": "norm", "lower": "aot_eager"}
    )
    for rows in (5, 7, 33):
        with torch._dynamo.config.patch(error_on_recompile=rows != 5):
            run(torch.randn(rows, 32)).sum().backward()
