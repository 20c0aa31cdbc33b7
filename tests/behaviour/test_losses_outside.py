"""With the autocast block dropped, losses outside of the compiled model are eager autocast's, bit for bit.

Autocast takes each of these in float32. Eager autocast runs model and loss in its block; ours the compiled
model alone, and the loss in plain eager mode on what leaves it.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampcompile
from tests.compiling import HALF, LOW

ROWS, WIDTH = 6, 5


CLASSES = torch.tensor([0, 4, 2, 1, 3, 3])
SHARES = torch.softmax(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5)), -1)

OF_LOGARITHMS = {"ctc", "kl_div"}
LOSSES = {
    "cross_entropy": lambda h: F.cross_entropy(h, CLASSES),
    "kl_div": lambda h: F.kl_div(h, SHARES, reduction="batchmean"),
    "bce_with_logits": lambda h: F.binary_cross_entropy_with_logits(h, SHARES),
    "triplet_margin": lambda h: F.triplet_margin_loss(h[:2], h[2:4], h[4:]),
    "ctc": lambda h: F.ctc_loss(h[:, None], torch.tensor([[1, 2]]), torch.tensor([ROWS]), torch.tensor([2])),
}


def trained(model, dtype, compiled, loss):
    """The losses of 20 steps, and the weights after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = ampcompile.GradScaler("cpu", init_scale=2.0**10, growth_interval=5, enabled=dtype == HALF)
    options = {"lower": compiled, "dtype": dtype}
    run = torch.compile(model, backend="amp", options=options) if compiled else model
    losses, generator = [], torch.Generator().manual_seed(1)
    for _ in range(20):
        x = torch.randn(ROWS, 4, generator=generator)
        with nullcontext() if compiled else torch.autocast("cpu", dtype):
            value = loss(run(x))
        optimizer.zero_grad()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(value.detach())
    return losses, list(model.parameters())


@pytest.mark.parametrize(("lower", "dtype"), [("aot_eager", LOW), ("eager", HALF)])
def test_twenty_steps_are_eager_autocasts_without_its_block(lower, dtype):
    for name, loss in LOSSES.items():
        last = nn.LogSoftmax(-1) if name in OF_LOGARITHMS else nn.Tanh()
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, WIDTH), last)
        losses, weights = trained(copy.deepcopy(model), dtype, "", loss)
        assert all(value.dtype == torch.float32 for value in losses), f"{name} isn't on autocast's list"
        assert len(set(map(float, losses))) > 15
        found, found_weights = trained(model, dtype, lower, loss)
        assert found == losses, name
        assert all(map(torch.equal, found_weights, weights)), name
