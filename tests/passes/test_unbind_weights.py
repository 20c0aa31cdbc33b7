"""Reads of copies become casts of the weights again, in bodies too; the bits stay."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampcompile.double_backward import kept
from ampcompile.passes.base import run_passes
from ampcompile.passes.graph import placeholders
from ampcompile.passes.unbind_weights import UnbindWeights
from ampcompile.passes.weight_copy import WEIGHT_COPY
from tests.passes.rewriting import count, rewritten


class Model(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x):
        return self.last(checkpoint(lambda v: self.first(v).relu(), x, use_reentrant=False))


def unbound(size: int, **options):
    model, x = Model(size), torch.randn(3, size)
    (found,) = rewritten(model, x, **options)
    twin = kept(found.graph)
    (applied,) = run_passes([UnbindWeights()], twin)
    weights = [p.meta["tensor_dict"] for p in placeholders(twin)]
    return model, x, found, twin, applied.rewrites, len(weights)


def test_fires_in_bodies_too_and_leaves_the_original_alone():
    model, x, found, twin, rewrites, _ = unbound(8)
    assert rewrites == count(found, WEIGHT_COPY) == 4
    assert not any(m.graph.find_nodes(op="call_function", target=WEIGHT_COPY) for m in twin.modules())
    given = {"weight": iter([model.first.weight, model.last.weight]), "bias": iter([model.first.bias, model.last.bias])}
    args = []
    for node in placeholders(twin):
        kind = "weight" if "weight" in node.name else "bias"
        args.append(None if "amp_copy" in node.meta else x if "x" in node.name else next(given[kind]))
    (result,) = twin(*args)
    with torch.autocast("cpu"):
        assert torch.equal(result, model(x))
    assert UnbindWeights().apply(twin) == 0
