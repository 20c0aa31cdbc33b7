"""Roundings that change nothing are dropped; where a number may be held in float32, they stay."""

import uuid

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompile.compiler import lower
from ampcompile.passes.after.drop_roundings import DropRoundings
from ampcompile.torch_private import lowering
from tests.compiling import HIGH, LOW, amp, gradients, leave_out, same_bits

CASES = {  # what is done to the product of two matrices, and the ops that are left to round
    "relu": (lambda a, b: (a @ b).relu(), {"mm"}),
    "of a view": (lambda a, b: (a @ b).t().neg().abs(), {"mm"}),
    "of what is rounded": (lambda a, b: (a + b).relu() * a, {"add", "mul"}),
    "of inputs": (lambda a, b: torch.where(a > b, a, b).maximum(a), {"gt"}),
    "of a sum": (lambda a, b: a.sum(0).relu(), {"sum", "relu"}),
    "of a pool": (lambda a, b: F.avg_pool2d(a[None, None], 2).relu(), {"avg_pool2d", "relu"}),
    "of a softmax": (lambda a, b: (a.softmax(-1).relu() @ b).relu(), {"_softmax", "relu", "mm"}),
    "of two types": (lambda a, b: a.maximum(b.to(HIGH)), {"maximum", "_to_copy"}),
}


def graph(f, *args: Tensor) -> torch.fx.GraphModule:
    """With the marks that torch gives: of all ops that read or give 16-bit numbers."""
    gm = make_fx(f, tracing_mode="fake")(*args)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            values = [node.meta["val"], *(operand.meta["val"] for operand in node.all_input_nodes)]
            if any(isinstance(value, Tensor) and value.dtype == LOW for value in values):
                node.meta[lowering.ROUNDS] = True
    return gm


@pytest.mark.parametrize("name", CASES)
def test_what_still_rounds(name):
    f, left = CASES[name]
    gm = graph(f, torch.ones(4, 4, dtype=LOW), torch.ones(4, 4, dtype=LOW))
    before = sum(lowering.ROUNDS in node.meta for node in gm.graph.nodes)
    dropped = DropRoundings().apply(gm)
    marked = [node for node in gm.graph.nodes if lowering.ROUNDS in node.meta]
    kinds = {node.target._schema.name.removeprefix("aten::") for node in marked if not node.target.is_view}
    assert kinds == left and len(marked) == before - dropped
    assert DropRoundings().apply(gm) == 0


def test_templates_hand_on_what_they_add_up():
    f, _ = CASES["relu"]
    gm = graph(f, torch.ones(4, 4, dtype=LOW), torch.ones(4, 4, dtype=LOW))
    with torch._inductor.config.patch(max_autotune_gemm=True):
        assert DropRoundings().apply(gm) == 0
    assert DropRoundings().apply(gm) == 1


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Linear(54, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.avg_pool2d(self.first(x).relu(), 2).neg().abs().flatten(1)).relu().maximum(x[:, 0, 0])


@pytest.mark.ci
def test_inductor_marks_what_the_pass_knows_and_gives_the_same_bits_without(monkeypatch):
    monkeypatch.setattr(lower, "cache_key", lambda *_: str(uuid.uuid4()))  # nothing comes from caches
    dropped = []
    apply = DropRoundings.apply
    monkeypatch.setattr(DropRoundings, "apply", lambda self, gm: dropped.append(apply(self, gm)) or dropped[-1])
    model, x = Pooled(), torch.randn(2, 3, 8, 8, dtype=LOW)
    found = gradients(model, lambda m: amp(m, lower="inductor")[0](x).float().square().sum())
    assert dropped == [6], "relu twice, neg, abs, and the gradients of both relu"
    torch._dynamo.reset()
    leave_out(DropRoundings(), monkeypatch)
    assert same_bits(gradients(model, lambda m: amp(m, lower="inductor")[0](x).float().square().sum()), found)
