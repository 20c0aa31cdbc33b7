"""A narrowing cast behind `cat` becomes one of each part, and no bit changes."""

import pytest
import torch
import torch.nn.functional as F

from ampcompile.passes.before.fold_casts import FoldCasts
from ampcompile.passes.before.split_casts_over_cat import SplitCastsOverCat
from tests.compiling import LOW, amp
from tests.passes.tidied import inserted, ours, spelled, tidied

FIRES = {  # the function, and the casts of ours before, after and after folding
    "cat": (lambda x, w: torch.mm(torch.cat([x, w]), w), 2, 3, 3),
    "parts of other sizes": (lambda x, w: torch.mm(torch.cat([x[:3], w, x[3:]]), w), 2, 4, 4),
    "a part twice": (lambda x, w: torch.mm(torch.cat([x, x], 1), torch.cat([w, w])), 2, 4, 4),
    "stack": (lambda x, w: torch.bmm(torch.stack([x, w]), torch.stack([w, x])), 2, 4, 4),
    "widened": (lambda x, w: torch.mm(torch.cat([torch.mm(x, w).float(), torch.mm(w, x).float()]), w), 6, 7, 5),
    "low beside float32": (lambda x, w: torch.mm(torch.cat([torch.mm(x, w), x]), w), 5, 6, 4),
}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", FIRES)
def test_fires_with_the_same_bits(name, gradients):
    f, before, after, folded = FIRES[name]
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    gm = inserted(f, x, w)
    assert len(ours(gm)) == before
    assert tidied(gm, SplitCastsOverCat(), x, w, gradients=gradients)
    assert not any(op.endswith("f32") for op in spelled(gm) if op.startswith(("cat", "stack")))
    assert len(ours(gm)) == after
    tidied(gm, FoldCasts(gradients), x, w, gradients=gradients)
    assert len(ours(gm)) == folded
    assert tidied(gm, SplitCastsOverCat(), x, w, gradients=gradients) == 0


def written(x, w):
    whole = torch.cat([x, w])
    x.add_(1)
    return torch.mm(whole, w)


DECLINES = {
    "another reader": lambda x, w: (whole := torch.cat([x, w]), torch.mm(whole, w))[1] + whole,
    "parts of more digits": lambda x, w: torch.mm(torch.cat([x.double(), w.double()]).float(), w),
    "integers among the parts": lambda x, w: torch.mm(torch.cat([x, (w * 100).long()]), w),
    "memory written in between": written,
    "the user's own cast": lambda x, w: torch.cat([x, w]).to(LOW) * 2,
}


@pytest.mark.parametrize("name", DECLINES)
def test_declines(name):
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    gm = inserted(DECLINES[name], x, w)
    assert tidied(gm, SplitCastsOverCat(), x, w) == 0


def test_weights_that_are_joined_have_copies():
    q, k = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
    run, recorder = amp(lambda x: F.linear(x, torch.cat([q.weight, k.weight])))
    run(torch.randn(4, 8))
    history = {applied.name: applied.rewrites for applied in recorder.graphs[0].history}
    assert history["split_casts_over_cat"] == 1 and history["hoist_weights"] == 2
