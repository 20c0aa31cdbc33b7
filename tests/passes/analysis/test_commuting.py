"""Which ops a cast may change places with, and that they give the same bits if it does."""

import pytest
import torch
import torch.nn.functional as F

from ampcompile.passes.analysis.commuting import classify_movement, constants_survive
from tests.compiling import HALF, LOW
from tests.passes.captured import captured

MASK = torch.eye(8).flip(0).cumsum(0) > 0
MOVING = {
    "t": lambda x: x.t(),
    "permute": lambda x: x.permute(1, 0),
    "view": lambda x: x.view(2, 32),
    "reshape": lambda x: x.t().reshape(4, 16),
    "slice": lambda x: x[1:5],
    "select": lambda x: x[3],
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "pad": lambda x: F.pad(x, (1, 2), value=-0.25),
    "flip": lambda x: x.flip(0),
    "contiguous": lambda x: x.t().contiguous(),
    "masked": lambda x: x.masked_fill(MASK, float("-inf")),
    "triangle": lambda x: x.tril(1),
    "diagonal": lambda x: x.diagonal(),
    "pixel shuffle": lambda x: F.pixel_shuffle(x.view(4, 4, 4), 2),
}
TWICE = torch.tensor([1, 1])
REPEATING = {
    "expand": lambda x: x.expand(3, 8, 8),
    "index_select": lambda x: x.index_select(0, TWICE),
    "index": lambda x: x[:, TWICE],
    "gather": lambda x: x.gather(0, torch.zeros(8, 8, dtype=torch.long)),
    "a wider mask": lambda x: x.masked_fill(MASK.expand(3, 8, 8), 0),
    "embedding": lambda x: F.embedding(TWICE, x),
    "take": lambda x: x.take(TWICE),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "reflected": lambda x: F.pad(x[None], (1, 2), mode="reflect"),
    "replicated": lambda x: F.pad(x[None], (1, 2), mode="replicate"),
}
OTHERS = {
    "sin": torch.sin,
    "sum": lambda x: x.sum(0),
    "bits": lambda x: x.view(torch.int32),
    "a maximum, which may": lambda x: x.amax(0),
    "max pooling, which may return a zero of another sign": lambda x: F.max_pool1d(x, 2),
}


def last(f):
    node = captured(f, torch.randn(8, 8), dtype=None).graph.output_node().all_input_nodes[0]
    return node


@pytest.mark.parametrize("name", [*MOVING, *REPEATING])
def test_a_cast_before_gives_the_bits_of_a_cast_behind(name):
    f = (MOVING | REPEATING)[name]
    assert classify_movement(last(f)) == ("moves" if name in MOVING else "repeats")
    x = torch.randn(8, 8) * torch.tensor([1e-40, 1e30] * 4)
    for dtype in (LOW, HALF):
        assert torch.equal(f(x).to(dtype), f(x.to(dtype)))


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_left_alone(name):
    assert classify_movement(last(OTHERS[name])) == ""


def test_constants_must_be_the_same_in_both_types():
    for value, fits in ((0.25, True), (0.1, False), (70000.0, False), (torch.inf, True)):
        assert constants_survive(last(lambda x, v=value: F.pad(x, (1, 1), value=v)), HALF) == fits
    assert constants_survive(last(lambda x: x.clamp(-2.0, 0.5)), LOW)
    assert not constants_survive(last(lambda x: x.clamp(0, 1)), LOW), "which zero it returns is up to the kernel"
    assert not constants_survive(last(lambda x: x.clamp(x, x)), LOW)
    for value, fits in ((0, True), (-1e9, False), (0.1, False)):
        assert constants_survive(last(lambda x, v=value: x.masked_fill(MASK, v)), LOW) == fits
