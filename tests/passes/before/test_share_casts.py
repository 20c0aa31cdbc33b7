"""One cast per value and dtype, where no sum of gradients changes."""

import pytest
import torch

from ampcompile.passes.share_casts import ShareCasts
from tests.compiling import amp, eager, same_bits
from tests.passes.tidied import inserted, ours, tidied


def three_readers(x, w):
    return torch.mm(x, w), torch.mm(x, w.t()), torch.mm(x + 0, w)


def without_gradients(x, w):
    with torch.no_grad():
        frozen = torch.mm(x, w) + torch.mm(w, x)
    return torch.mm(x, frozen) + torch.mm(w, frozen.float())


def of_two_types(x, w):
    with torch.autocast("cpu", torch.float16):
        half = torch.mm(x, w)
    return half, torch.mm(x, w), torch.mm(w, x)


def written(x, w):
    first = torch.mm(x, w)
    x.add_(1)
    return first, torch.mm(x, w[:])


CASES = {  # a function, whether gradients are wanted, the casts that are saved, and those that are left
    "x once more, w once more": (three_readers, False, 2, 4),
    "gradients would be summed in low precision": (three_readers, True, 0, 6),
    "in a region without gradients": (without_gradients, True, 2, 5),
    "casts to several types stay apart": (of_two_types, False, 2, 4),
    "memory is written in between": (written, False, 0, 4),
    "and gradients flow": (written, True, 0, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_shared(name):
    f, gradients, saved, left = CASES[name]
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    gm = inserted(f, x, w)
    assert tidied(gm, ShareCasts(gradients), x, w, gradients=gradients) == saved
    assert len(ours(gm)) == left


def written_as_another_input(x, part, w):
    first = torch.mm(x, w)
    part.add_(1)
    return first, torch.mm(x, w[:])


@pytest.mark.parametrize("lower", ["eager", "aot_eager"])
def test_an_input_that_is_written_as_another_input_is_cast_again(lower):
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    same = x.clone()
    with torch.no_grad():
        found = amp(written_as_another_input, lower=lower)[0](x, x[2:4], w)
    assert same_bits(found, eager(written_as_another_input, same, same[2:4], w)) and torch.equal(x, same)
