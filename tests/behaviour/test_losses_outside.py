"""With the autocast block dropped, losses outside of the compiled model are eager autocast's, bit for bit.

Autocast takes every one of these in float32. Eager autocast runs model and loss in its block; ours the compiled
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


def two(h):
    return h[:3], h[3:]


def three(h):
    return h[:2], h[2:4], h[4:]


SIGNS = torch.tensor([1.0, -1.0, 1.0])
CLASSES = torch.tensor([0, 4, 2, 1, 3, 3])
TARGET = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
SHARES = torch.softmax(TARGET, -1)

OF_LOGARITHMS = {"ctc", "kl_div", "nll"}
LOSSES = {
    "cross_entropy": lambda h: F.cross_entropy(h, CLASSES),
    "cross_entropy, shares": lambda h: F.cross_entropy(h, SHARES, label_smoothing=0.1),
    "nll": lambda h: F.nll_loss(h, CLASSES),
    "mse": lambda h: F.mse_loss(h, TARGET),
    "l1": lambda h: F.l1_loss(h, TARGET),
    "smooth_l1": lambda h: F.smooth_l1_loss(h, TARGET),
    "huber": lambda h: F.huber_loss(h, TARGET),
    "kl_div": lambda h: F.kl_div(h, SHARES, reduction="batchmean"),
    "bce_with_logits": lambda h: F.binary_cross_entropy_with_logits(h, SHARES),
    "poisson_nll": lambda h: F.poisson_nll_loss(h, SHARES),
    "gaussian_nll": lambda h: F.gaussian_nll_loss(h, TARGET, SHARES),
    "cosine_embedding": lambda h: F.cosine_embedding_loss(*two(h), SIGNS, margin=0.1),
    "hinge_embedding": lambda h: F.hinge_embedding_loss(h, TARGET.sign()),
    "margin_ranking": lambda h: F.margin_ranking_loss(h[:3, 0], h[3:, 0], SIGNS, margin=0.1),
    "soft_margin": lambda h: F.soft_margin_loss(h, TARGET.sign()),
    "multi_margin": lambda h: F.multi_margin_loss(h, CLASSES),
    "multilabel_margin": lambda h: F.multilabel_margin_loss(h, CLASSES[:, None].expand(ROWS, WIDTH).contiguous()),
    "triplet_margin": lambda h: F.triplet_margin_loss(*three(h)),
    "ctc": lambda h: F.ctc_loss(h[:, None], torch.tensor([[1, 2]]), torch.tensor([ROWS]), torch.tensor([2])),
    "cdist": lambda h: torch.cdist(*two(h)).sum(),
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
