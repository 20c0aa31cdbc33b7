"""Casts move to where there are fewer bytes to cast, and no bit changes."""

import pytest
import torch
import torch.nn.functional as F

from ampcompile.passes.analysis.sizes import elements_hint
from ampcompile.passes.before.move_casts import MoveCasts
from ampcompile.passes.graph import cast_of
from tests.passes.tidied import inserted, ours, tidied

FIRES = {  # the function, whether it needs to be without gradients, and the elements cast before and after
    "up through expand": (lambda x: torch.mm(x.expand(4, 8, 8).reshape(32, 8), x), True, 256 + 64, 64 + 64),
    "up through padding": (lambda x: torch.mm(F.pad(x, (0, 0, 0, 8), value=0.5), x), False, 128 + 64, 64 + 64),
    "up through repeat": (lambda x: torch.mm(x.repeat(3, 1), x), True, 192 + 64, 64 + 64),
    "up past a view": (
        lambda x: torch.mm(x.expand(2, 8, 8).reshape(16, 8).view(8, 16), x.t().reshape(16, 4)),
        True,
        128 + 64,
        64 + 64,
    ),
    "down through slices": (lambda x: x.sin()[2:4].exp(), False, 64, 16),
    "down through select": (lambda x: x.sin().t().select(0, 1).exp(), False, 64, 8),
}
POLICY = "op sin=fp32_inside"


def cast_elements(gm):
    return sum(elements_hint(cast.meta["val"]) for cast in ours(gm))


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", FIRES)
def test_fires_with_the_same_bits(name, gradients):
    f, needs_none, before, after = FIRES[name]
    x = torch.randn(8, 8)
    gm = inserted(f, x, policy=POLICY)
    assert cast_elements(gm) == before
    fires = not (gradients and needs_none)
    assert tidied(gm, MoveCasts(gradients), x, gradients=gradients) == fires
    assert cast_elements(gm) == (after if fires else before)
    assert tidied(gm, MoveCasts(gradients), x, gradients=gradients) == 0
    assert not fires or any(cast_of(cast).fate == ("inserted", "moved") for cast in ours(gm))


def written(x):
    wide = x.expand(4, 8, 8).reshape(32, 8)
    x.add_(1)
    return torch.mm(wide, x)


def read_twice(x):
    padded = F.pad(x, (0, 0, 0, 8), value=0.5)
    return torch.mm(padded, x), padded.exp()


DECLINES = {
    "a padding that rounds": lambda x: torch.mm(F.pad(x, (0, 0, 0, 8), value=0.1), x),
    "a padding that adds up": lambda x: torch.mm(F.pad(x, (4, 4), mode="circular"), torch.ones(16, 8)),
    "another layout before a product": lambda x: torch.bmm(x.expand(4, 8, 8), x.expand(4, 8, 8)),
    "as many bytes": lambda x: torch.mm(x.t().reshape(4, 16), x.view(16, 4)),
    "random numbers": lambda x: torch.mm(F.dropout(x[:4], 0.0), x),
    "memory written in between": written,
    "a value with other readers": read_twice,
}


@pytest.mark.parametrize("name", DECLINES)
def test_declines(name):
    x = torch.randn(8, 8)
    gm = inserted(DECLINES[name], x)
    before = cast_elements(gm)
    tidied(gm, MoveCasts(gradients=False), x, gradients=False)
    assert cast_elements(gm) == before
