"""Two casts in a row are one exactly where that changes nothing, to values and to gradients."""

import itertools
from dataclasses import replace

import numpy
import pytest
import torch

from ampcompile.dtypes import is_lossless
from ampcompile.passes.analysis.commuting import is_cast
from ampcompile.passes.before.fold_casts import FoldCasts
from ampcompile.passes.graph import Cast, note
from tests.compiling import HALF, HIGH, LOW, same_bits
from tests.passes.captured import captured, settled
from tests.passes.tidied import inserted, ours, spelled, tidied

DOUBLE = torch.float64
CHAINS = [c for c in itertools.product((HALF, LOW, HIGH, DOUBLE), repeat=3) if c[0] != c[1] != c[2]]
FOLD = FoldCasts(gradients=True)


def numbers(dtype):
    """Every 16-bit pattern; of wider types random patterns, and numbers beside the midpoints of narrower types."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    integers = torch.int32 if dtype == HIGH else torch.int64
    info = torch.iinfo(integers)
    patterns = torch.randint(info.min, info.max, (200_000,), dtype=integers).view(dtype)
    halfway = [1 + 2.0**-11, 1 + 2.0**-8, 1 + 2.0**-24, 65520.0, 1e-8, 70000.0]
    near = [n * (1 + s * 2.0**-40) for n in halfway for s in (-1, 0, 1)]
    moderate = torch.randn(200_000, dtype=DOUBLE)
    return torch.cat([patterns, moderate.to(dtype), torch.tensor(near, dtype=DOUBLE).to(dtype)])


def rounded(values, dtype):
    """A cast as IEEE has it, rounded once; torch's own kernels round float64 by way of float32."""
    if values.dtype != DOUBLE or dtype in (DOUBLE, HIGH):
        return values.to(dtype)
    if dtype == HALF:
        with numpy.errstate(all="ignore"):
            return torch.from_numpy(values.numpy().astype(numpy.float16))
    once = values.float()  # rounded to odd, so that rounding again to fewer digits is rounding once
    inexact = (once.double() != values) & values.isfinite() & once.isfinite()
    bits = once.view(torch.int32)
    too_far = inexact & (once.double().abs() > values.abs())
    bits = torch.where(too_far, bits - 1, bits)
    return torch.where(inexact, bits | 1, bits).view(HIGH).to(dtype)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: "-".join(str(d).removeprefix("torch.") for d in c))
def test_a_chain_is_folded_if_and_only_if_that_is_exact(chain, gradients):
    """To gradients too, which go back through it."""
    first, second, third = chain
    values, back = numbers(first), numbers(third)
    exact = same_bits(rounded(rounded(values, second), third), rounded(values, third))
    assert exact == is_lossless(first, second)
    if gradients:
        exact = exact and same_bits(rounded(rounded(back, second), first), rounded(back, first))
    gm = settled(captured(lambda x: x.to(second).to(third) * 1, torch.ones(3, dtype=first), dtype=None))
    inner, outer = [node for node in gm.graph.nodes if is_cast(node)]
    for cast in (inner, outer):
        note(cast, cast=Cast("aten.mul", "a test"))  # as if both were ours
    assert FoldCasts(gradients).apply(gm) == exact
    assert (len([node for node in gm.graph.nodes if is_cast(node)])) == 2 - exact * (1 + (first == third))


BEHIND = {  # fires: what the user does to a product `h` before the next one; the ops that are left between the two
    "widened": (lambda h: h.float(), ""),
    "views": (
        lambda h: h.float().t().reshape(4, 2, 8).permute(1, 0, 2).reshape(8, 8),
        "t reshape permute reshape",
    ),
    "clamped": (lambda h: h.float().clamp(-0.5, 0.25), "clamp"),
    "relu": (lambda h: h.float().relu(), "relu"),
    "padded": (lambda h: torch.nn.functional.pad(h.float()[:, 1:], (1, 0), value=0.5), "slice constant_pad_nd"),
    "asked for twice": (lambda h: h.float().to(HIGH), ""),
}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", BEHIND)
def test_fires_with_the_same_bits(name, gradients):
    between, left = BEHIND[name]
    x = torch.randn(8, 8)
    gm = inserted(lambda x: torch.mm(between(torch.mm(x, x)), x), x)
    assert tidied(gm, FoldCasts(gradients), x, gradients=gradients) == 1
    low = [op.removesuffix(":bf16") for op in spelled(gm) if op.endswith(":bf16")]
    assert low == ["to", "to", "mm", *left.split(), "to", "mm"]


def written(x):
    h = torch.mm(x, x)
    wide = h.float()
    h.mul_(2)
    return torch.mm(wide, x)


def read_twice(x):
    wide = torch.mm(x, x).float()
    return torch.mm(wide, x), wide.softmax(-1)


DECLINES = {
    "the user's own pair": lambda x: torch.mm(x, x).float().to(LOW).float() * x,
    "another op between": lambda x: torch.mm(torch.mm(x, x).float().sin(), x),
    "a number that low precision changes": lambda x: torch.mm(torch.mm(x, x).float().clamp(-0.1, 0.1), x),
    "a bound of zero, which has a sign": lambda x: torch.mm(torch.mm(x, x).float().clamp(0.0, 1.0), x),
    "bits read as other numbers": lambda x: torch.mm(torch.mm(x, x).float().view(torch.int32).view(HIGH), x),
    "memory written in between": written,
    "gradients that would be summed in low precision": read_twice,
}


@pytest.mark.parametrize("name", DECLINES)
def test_declines(name):
    x = torch.randn(8, 8)
    assert tidied(inserted(DECLINES[name], x), FOLD, x) == 0


def test_without_gradients_a_value_may_have_other_readers():
    x = torch.randn(8, 8)
    gm = inserted(read_twice, x)
    assert tidied(gm, FoldCasts(gradients=False), x, gradients=False) == 1
    assert "to:f32" in spelled(gm)  # the user's cast, for softmax


def test_only_relaxed_keeps_what_the_first_of_two_of_ours_rounds_off():
    x = torch.randn(8, 8)
    gm = inserted(lambda x: torch.sin(x).exp(), x, policy="op sin=fp32_inside, op exp=fp32")
    assert [s for s in spelled(gm) if s.startswith("to")] == ["to:bf16", "to:f32"]
    assert FoldCasts(True).apply(gm) == 0
    assert not replace(FOLD, relaxed=True).exact and FoldCasts(True, relaxed=True).apply(gm) == 1
    assert ours(gm) == []
    assert torch.equal(gm(x)[0], x.sin().exp())


def test_choices_give_the_same_bits_for_every_16_bit_number():
    for dtype in (LOW, HALF):
        x = numbers(dtype)
        for f in (torch.relu, torch.abs, torch.neg, lambda v: v.clamp(-0.5, 2.0), lambda v: v.clamp(min=1.0)):
            low, wide = f(x), f(x.float()).to(dtype)
            assert same_bits(low, wide)
