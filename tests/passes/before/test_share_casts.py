"""One cast per value and dtype, where no sum of gradients changes."""

import pytest
import torch

from ampcompile.passes.share_casts import ShareCasts
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


def test_casts_to_several_types_stay_apart():
    def f(x, w):
        with torch.autocast("cpu", torch.float16):
            half = torch.mm(x, w)
        return half, torch.mm(x, w), torch.mm(w, x)

    x, w = torch.randn(8, 8), torch.randn(8, 8)
    gm = inserted(f, x, w)
    assert tidied(gm, ShareCasts(gradients=False), x, w, gradients=False) == 2 and len(ours(gm)) == 4


def written(x, w):
    first = torch.mm(x, w)
    x.add_(1)
    return first, torch.mm(x, w[:])


def written_as_another_input(x, part, w):
    first = torch.mm(x, w)
    part.add_(1)
    return first, torch.mm(x, w[:])


@pytest.mark.parametrize("lower", ["eager", "aot_eager"])
def test_an_input_that_is_written_as_another_input_is_cast_again(lower):
    options = {"lower": lower, "outputs": "autocast"}
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    same = x.clone()
    with torch.no_grad():
        found = torch.compile(written_as_another_input, backend="amp", options=options)(x, x[2:4], w)
    with torch.autocast("cpu"):
        expected = written_as_another_input(same, same[2:4], w)
    assert all(map(torch.equal, found, expected)) and torch.equal(x, same)


@pytest.mark.parametrize(("f", "gradients"), [(three_readers, True), (written, True), (written, False)])
def test_declines_where_gradients_are_summed_and_where_memory_is_written(f, gradients):
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    assert tidied(inserted(f, x, w), ShareCasts(gradients), x, w, gradients=gradients) == 0
