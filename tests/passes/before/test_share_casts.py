"""One cast per value and dtype, where no sum of gradients changes."""

import pytest
import torch

from ampcompile.passes.before.share_casts import ShareCasts
from tests.passes.tidied import inserted, ours, tidied


def three_readers(x, w):
    return torch.mm(x, w), torch.mm(x, w.t()), torch.mm(x + 0, w)


def test_fires_where_no_gradient_flows():
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    gm = inserted(three_readers, x, w)
    before = len(ours(gm))
    assert tidied(gm, ShareCasts(gradients=False), x, w, gradients=False) == 2  # x once more, w once more
    assert len(ours(gm)) == before - 2
    assert tidied(gm, ShareCasts(gradients=False), x, w, gradients=False) == 0


def test_fires_in_a_region_without_gradients():
    def f(x, w):
        with torch.no_grad():
            frozen = torch.mm(x, w) + torch.mm(w, x)
        return torch.mm(x, frozen) + torch.mm(w, frozen.float())

    x, w = torch.randn(8, 8), torch.randn(8, 8)
    gm = inserted(f, x, w)
    assert tidied(gm, ShareCasts(gradients=True), x, w) == 2


def written(x, w):
    first = torch.mm(x, w)
    x.add_(1)
    return first, torch.mm(x, w[:])


@pytest.mark.parametrize("f", [three_readers, written])
def test_declines(f):
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    gm = inserted(f, x, w)
    assert tidied(gm, ShareCasts(gradients=True), x, w) == 0


def test_a_value_written_between_two_readers_is_cast_twice():
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    assert tidied(inserted(written, x, w), ShareCasts(gradients=False), x, w, gradients=False) == 0
