"""Group norms in one kernel with SiLU, casts and the sum around them: where, where not, numbers and gradients."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampcompile
from ampcompile.kernels.group_norm import GROUP_NORM
from ampcompile.passes.base import run_passes
from ampcompile.passes.fuse.fuse_norm import FuseNorm
from ampcompile.passes.fuse.matching import FusionCost
from benchmarks.unet import UNet
from tests.compiling import HIGH, LOW, error, training_errors
from tests.passes.fuse.test_fuse_norm import in_float64, in_order, to
from tests.passes.rewriting import count, rewritten
from tests.passes.tidied import inserted, ours, results

pytestmark = pytest.mark.ci  # with default options nothing of it fires, or little

FUSE = FuseNorm(FusionCost("norm"))
X, W, V, B = torch.empty(2, 8, 5, 3), torch.empty(8, 8, 3, 3), torch.empty(8), torch.empty(8)


@pytest.fixture(autouse=True)
def drawn() -> None:
    """Numbers of the test's own seed."""
    for value in (X, V, B):
        value.normal_()
    W.normal_(std=1 / 8)


def conv(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1)


def behind_float32(x, w, v, b):
    return conv(F.silu(F.group_norm(x, 2, v, b)), w)


def between_convolutions(x, w, v, b):
    """As a GPU's graph has it, where group norms run in float32."""
    h = to(conv(x, w) + b.view(1, -1, 1, 1), HIGH)
    return conv(F.silu(F.group_norm(h, 4, v, b, 1e-6)), w)


def in_16_bits(x, w, v, b):
    """As a CPU's graph has it: the norm is rounded before SiLU."""
    return conv(F.silu(F.group_norm(conv(x, w), 2, v, b)), w)


def of_a_sum(x, w, v, b):
    h = conv(x, w) + conv(x + 1, w)
    y = F.group_norm(to(h, HIGH), 2, v, b)
    return h, y.flatten(2).transpose(1, 2) @ w[0, :, :, :1].flatten(1)


def read_in_both_widths(x, w, v, b):
    y = F.silu(F.group_norm(x, 2))
    return conv(y, w), conv(y, w.flip(0)), y + 1


def norm_read_beside_silu(x, w, v, b):
    y = F.group_norm(x, 2, v, b)
    return conv(F.silu(y), w), conv(y, w)


FIRES = [behind_float32, between_convolutions, in_16_bits, of_a_sum, read_in_both_widths, norm_read_beside_silu]
# Is there a residual, and SiLU, inner, wide, low, how many.
GETS = {
    behind_float32: (False, True, False, False, LOW, 1),
    between_convolutions: (False, True, False, False, LOW, 1),
    in_16_bits: (False, True, True, False, LOW, 1),
    of_a_sum: (True, False, False, False, LOW, 1),
    read_in_both_widths: (False, True, False, True, LOW, 2),
    norm_read_beside_silu: (False, False, False, True, LOW, 1),
}


@pytest.mark.parametrize("f", FIRES, ids=lambda f: f.__name__)
def test_fires_with_values_and_gradients_no_further_from_float64(f: Any) -> None:
    expected, f, totals = GETS[f], in_order(f), [0.0, 0.0]
    unfused = inserted(f, X, W, V, B)
    fused = copy.deepcopy(unfused)
    assert run_passes([FUSE], fused)[0].rewrites == 1
    (call,) = fused.graph.find_nodes(op="call_function", target=GROUP_NORM)
    assert (call.args[1] is not None, *call.args[6:]) == expected
    assert run_passes([FUSE], fused)[0].rewrites == 0, "idempotent"
    for _ in range(8):
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


def test_no_cast_is_left_between_the_convolutions() -> None:
    gm = inserted(between_convolutions, X, W, V, B)
    run_passes([FUSE], gm)
    assert {cast.args[0].op for cast in ours(gm)} == {"placeholder"}


def written(x, w, v, b):
    y = F.group_norm(x, 2, v, b)
    out = conv(y, w)
    y.add_(1)
    return out, y


def silu_in_place(x, w, v, b):
    return conv(F.silu(F.group_norm(x, 2, v, b), inplace=True), w)


def nothing_low(x, w, v, b):
    return F.silu(F.group_norm(x, 2, v, b)) + 1


def channels_last(x, w, v, b):
    return conv(F.silu(F.group_norm(x.to(memory_format=torch.channels_last), 2, v, b)), w)


def another_layout(x, w, v, b):
    return conv(F.silu(F.group_norm(x.transpose(2, 3), 2, v, b)), w)


def in_float64_itself(x, w, v, b):
    return conv(F.silu(F.group_norm(x.double(), 2)).float(), w)


def silu_without_a_gradient(x, w, v, b):
    y = F.group_norm(x, 2, v, b)
    with torch.no_grad():
        return conv(F.silu(y), w)


def no_places(x, w, v, b):
    return conv(F.silu(F.group_norm(x[..., :0], 2, v, b)).sum(3, keepdim=True), w)


DECLINES = [
    written,
    silu_in_place,
    nothing_low,
    channels_last,
    another_layout,
    in_float64_itself,
    silu_without_a_gradient,
    *([] if torch.__version__ >= "2.14" else [no_places]),  # later releases refuse it
]


@pytest.mark.parametrize("f", DECLINES, ids=lambda f: f.__name__)
def test_declines(f: Any) -> None:
    gm = inserted(in_order(f), X, W, V, B)
    before = str(gm.graph)
    assert run_passes([FUSE], gm)[0].rewrites == 0 and str(gm.graph) == before


class Block(nn.Module):
    """As UNets of diffusion models have them: a time's embedding added between, a skip connection, attention's norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_in, self.norm_out, self.last = (nn.GroupNorm(4, 16) for _ in range(3))
        self.conv_in, self.conv_out = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.time, self.query = nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv_in(F.silu(self.norm_in(x))) + self.time(F.silu(time))[:, :, None, None]
        h = x + self.conv_out(F.silu(self.norm_out(h)))
        return h + self.query(self.last(h).flatten(2).transpose(1, 2)).transpose(1, 2).view_as(h)


def loss(model: nn.Module, *inputs: Tensor) -> Tensor:
    return model(*inputs).square().mean()


@pytest.mark.parametrize("weights", ["cached", "every_call"])
def test_a_block_trains_and_nothing_is_further_from_float64(weights: str) -> None:
    inputs = torch.randn(2, 16, 6, 6), torch.randn(2, 8)
    eager, ours, recorder = training_errors(Block(), loss, inputs, fuse="norm", weights=weights)
    (graph,) = recorder.graphs
    calls = graph.graph.graph.find_nodes(op="call_function", target=GROUP_NORM)
    how = [(call.args[1] is not None, call.args[6]) for call in calls]
    assert how == [(False, True), (False, True), (True, False)]
    assert ours <= 1.02 * eager


@pytest.mark.ci
def test_a_unet_trains_with_all_its_group_norms_fused() -> None:
    picture = torch.randn(8, 3, 16, 16)
    eager, ours, recorder = training_errors(UNet(8, (1, 2)), lambda model, x: model(x, x), [picture], fuse="norm")
    (graph,) = recorder.graphs
    assert count(graph, GROUP_NORM) == 11
    assert ours <= 1.02 * eager


@pytest.mark.slow
def test_trains_by_inductor() -> None:
    inputs = torch.randn(2, 16, 6, 6), torch.randn(2, 8)
    eager, ours, _ = training_errors(Block(), loss, inputs, fuse="norm", lower="inductor")
    assert ours <= 1.02 * eager


def test_the_report_says_so() -> None:
    report = ampcompile.explain(Block(), fuse="norm")(torch.randn(2, 16, 6, 6), torch.randn(2, 8))
    assert [(fusion.family, fusion.op) for fusion in report.fusions] == [("norm", "aten.group_norm")] * 3
    assert [cast.fate[-1] for cast in report.casts].count("fused") == 2


def test_nothing_is_fused_unless_asked_for() -> None:
    for fuse in ("auto", "none", "linear"):
        (graph,) = rewritten(Block(), torch.randn(2, 16, 6, 6), torch.randn(2, 8), fuse=fuse)
        assert count(graph, GROUP_NORM) == 0
        torch._dynamo.reset()


@pytest.mark.ci
def test_one_graph_for_every_size() -> None:
    model = Block()
    run = torch.compile(
        model, backend="amp", dynamic=True, options={"outputs": "autocast", "fuse": "norm", "lower": "aot_eager"}
    )
    for samples, places in ((2, 5), (3, 7), (5, 4)):
        with torch._dynamo.config.patch(error_on_recompile=places != 5):
            run(torch.randn(samples, 16, places, places + 1), torch.randn(samples, 8)).sum().backward()
