"""After differentiation, 16-bit numbers are gathered and joined as they are, and widened behind, bit for bit."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ampcompile.passes.after.widen_late import WidenLate
from tests.compiling import HALF, HIGH, LOW, training_errors
from tests.models import Net
from tests.passes.tidied import tidied_joint, words

MOVED = {  # how often it moves an op (0: it declines), what is done to 16-bit numbers, and the ops afterwards
    "gathered": (1, lambda x, i: torch.ops.aten._unsafe_index(x.to(HIGH), [None, i]).sin(), "_unsafe_index > sin"),
    "gathered through a view": (1, lambda x, i: x.to(HIGH).t().index_select(1, i).sin(), "t index_select > sin"),
    "joined": (1, lambda x, i: torch.cat([x.to(HIGH), x.to(HIGH)[:2]]).sin(), "slice cat > sin"),
    "joined with what has 16 bits": (1, lambda x, i: torch.cat([x.to(HIGH), x]).sin(), "cat > sin"),
    "gathered, then joined": (
        2,
        lambda x, i: torch.cat([x.to(HIGH).index_select(0, i), x * 2]).sin(),
        "index_select mul cat > sin",
    ),
    "padded": (1, lambda x, i: F.pad(x.to(HIGH), (1, 1), value=0.5).sin(), "constant_pad_nd > sin"),
    "returned": (1, lambda x, i: x.to(HIGH).flip(0), "flip >"),
    "rounded again": (1, lambda x, i: (y := torch.cat([x.to(HIGH), x]), y.to(LOW) @ x, y.to(LOW).t())[1:], "cat mm t"),
    "rounded to the other type": (1, lambda x, i: torch.cat([x.to(HIGH), x]).to(HALF), "cat > <"),
    "what is computed": (0, lambda x, i: torch.cat([x.to(HIGH).sin(), x]), "> sin cat"),
    "a part of which more is known": (0, lambda x, i: torch.cat([x.to(HIGH), torch.ones(1, 4)]), "> ones cat"),
    "two low types": (0, lambda x, i: torch.cat([x.to(HIGH), x.to(HALF).to(HIGH)]), "> = > cat"),
    "joined as it is": (0, lambda x, i: torch.cat([x, x]), "cat"),
    "a constant that rounds": (0, lambda x, i: F.pad(x.to(HIGH), (1, 1), value=0.1).sin(), "> constant_pad_nd sin"),
    "views alone": (0, lambda x, i: x.to(HIGH).t()[1:].sin(), "> t slice sin"),
    "sums": (0, lambda x, i: torch.zeros(4, 4).index_put((i,), x.to(HIGH), accumulate=True), "zeros > index_put"),
    "joined with an input that is written later": (
        0,
        lambda x, i: (torch.cat([(x * 2).to(HIGH), x]), x.copy_(x * 3))[0],
        "mul > cat mul copy_",
    ),
    "an input that is written later": (
        0,
        lambda x, i: (torch.cat([x.to(HIGH), x]), x.copy_(x * 2))[0],
        "> cat mul copy_",
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_what_moves_with_the_same_bits(name):
    times, f, ops = MOVED[name]
    x = torch.randn(4, 4).to(LOW)
    x[0, 0], x[1, 1], x[2, 2] = float("nan"), -0.0, float("-inf")  # which are easily lost
    gm, moved = tidied_joint(f, WidenLate(), x, torch.tensor([2, 0, 0, 1]))
    assert (moved, words(gm)) == (times, ops)


def test_what_binds_a_size_found_at_run_time_stays():
    with FakeTensorMode(shape_env=ShapeEnv()):
        x, chosen = torch.randn(4, 4).to(LOW), torch.tensor([True, False, True, True])
    gm = make_fx(lambda x, chosen: x.to(HIGH)[chosen].sin(), tracing_mode="symbolic")(x, chosen)
    assert any(node.meta.get("unbacked_bindings") for node in gm.graph.nodes)
    assert WidenLate().apply(gm) == 0


def joined(m, x):
    """What autocast resizes, in float32, beside what a convolution gives, as in the decoder of a UNet."""
    low = m.down(x)
    return m.up(m.norm(torch.cat([F.interpolate(F.avg_pool2d(low, 2), scale_factor=2.0), low], dim=1)))


def test_gradients_are_as_exact_as_eager_autocasts():
    down, up = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Conv2d(8, 3, 3)
    model = Net(joined, down=down, up=up, norm=torch.nn.GroupNorm(2, 8))
    theirs, ours, _ = training_errors(model, lambda m, x: m(x).float().square().mean(), [torch.randn(2, 3, 8, 8)])
    assert ours <= 1.1 * theirs
