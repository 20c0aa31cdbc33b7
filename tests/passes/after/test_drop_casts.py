"""After differentiation, what was widened, rearranged and narrowed again is rearranged as it is, bit for bit."""

import pytest
import torch
import torch.nn.functional as F

import ampcompile
from ampcompile.passes.after.drop_casts import DropCasts
from tests.compiling import HALF, HIGH, LOW, amp, eager, gradients, same_bits
from tests.passes.tidied import tidied_joint, words

CASES = {  # what is done to 16-bit numbers, and the ops that are left
    "nothing between": (lambda x, i: x.to(HIGH).to(LOW) * 2, "mul"),
    "indexed": (lambda x, i: torch.ops.aten._unsafe_index(x.to(HIGH), [None, i]).to(LOW) * 2, "_unsafe_index mul"),
    "selected and repeated": (
        lambda x, i: x.to(HIGH).index_select(0, i).expand(3, 4, 4).contiguous().to(LOW) * 2,
        "index_select expand clone mul",
    ),
    "padded": (lambda x, i: F.pad(x.to(HIGH).t(), (1, 1), value=0.5).to(LOW) * 2, "t constant_pad_nd mul"),
    "clamped": (lambda x, i: x.to(HIGH).clamp(-0.5, 0.5).to(LOW) * 2, "clamp mul"),
    "masked": (lambda x, i: x.to(HIGH).masked_fill(x > 0, -torch.inf).tril().to(LOW) * 2, "gt masked_fill tril mul"),
    "reflected": (
        lambda x, i: F.pad(x.to(HIGH)[None], (1, 1), mode="reflect").to(LOW) * 2,
        "unsqueeze reflection_pad1d mul",
    ),
    "what is computed between": (lambda x, i: x.to(HIGH).sin().to(LOW) * 2, "> sin < mul"),
    "another low type": (lambda x, i: x.to(HIGH).to(HALF) * 2, "> < mul"),
    "a rounding": (lambda x, i: x.to(HALF).to(LOW) * 2, "= = mul"),
    "a constant that rounds": (
        lambda x, i: F.pad(x.to(HIGH), (1, 1), value=0.1).to(LOW) * 2,
        "> constant_pad_nd < mul",
    ),
    "sums": (
        lambda x, i: torch.zeros(3, 4).index_put((i,), x.to(HIGH), accumulate=True).to(LOW) * 2,
        "zeros > index_put < mul",
    ),
    "a rearranged value that others read": (
        lambda x, i: (y := x.to(HIGH).flip(0), y.to(LOW) * 2)[1] + y,
        "> flip < mul add",
    ),
    "what is returned": (lambda x, i: x.to(HIGH).to(LOW), "> <"),
    "what is returned as a view": (lambda x, i: (x.to(HIGH).to(LOW)[1:], x.to(HIGH).to(LOW).t()), "> < slice > < t"),
    "an input that backward may read when it is overwritten": (
        lambda x, i: x.copy_(x.t().to(HIGH).to(LOW) * 2),
        "t > < mul copy_",
    ),
    "the same to another tensor": (lambda x, i: x.t().to(HIGH).to(LOW) * 2, "t mul"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_left_and_has_the_same_bits(name):
    f, left = CASES[name]
    gm, dropped = tidied_joint(f, DropCasts(), torch.randn(4, 4).to(LOW), torch.tensor([2, 0, 0, 1]))
    assert words(gm) == left and bool(dropped) == (not set("<=>") & set(left))


def test_a_resized_image_is_not_widened_in_forward():
    """A convolution, group norm and a resized image, whose backward torch takes apart."""
    resize = torch.nn.GroupNorm(2, 4), torch.nn.Upsample(scale_factor=2.0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), *resize, torch.nn.Conv2d(4, 3, 3))
    image = torch.randn(1, 3, 6, 6)
    totals = {t.stage: t for t in ampcompile.explain(model)(image).totals}
    before, after = totals["bind_weights, forward and backward"], totals["drop_casts, forward and backward"]
    small, large = 4 * 4 * 4, 4 * 8 * 8  # what is resized and what comes of it; group norm's own gradient is small
    assert before.casts - after.casts == 3 and before.bytes - after.bytes == 6 * (small + large + small)


def test_group_norms_gradients_are_eagers_without_a_copy():
    model, x = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.GroupNorm(2, 4)), torch.randn(1, 3, 6, 6)
    run, _ = amp(model)
    ours = gradients(model, lambda m: run(x).float().square().sum())
    theirs = gradients(model, lambda m: eager(m, x).float().square().sum())
    assert same_bits(ours, theirs)


def test_views_of_what_is_returned_stay_apart_from_inputs_and_from_each_other():
    """Two casts in a row that give the same numbers make a tensor of its own, of which a view is returned."""
    x = torch.randn(4, 4)
    results = amp(lambda x: (x.double().float()[1:], x.double().float().view(-1), x.bfloat16()[1:], x.bfloat16()[:2]))[
        0
    ](x)
    assert len({t.untyped_storage().data_ptr() for t in (x, *results)}) == 5
    assert torch.equal(results[0], x[1:]) and torch.equal(results[1], x.view(-1))
