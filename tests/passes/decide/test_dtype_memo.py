"""Calls like earlier ones are not computed again, and no decision differs for it."""

import pytest
import torch
from torch.nn import functional as F

from ampcompile.passes.decide import dtype_memo
from ampcompile.passes.decide.assign_precision import AssignPrecision
from ampcompile.policy import Policy
from tests.compiling import LOW
from tests.passes.captured import captured, on

aten = torch.ops.aten


def layers(x, w):
    for _ in range(8):
        x = F.gelu(x @ w) + x
    return x


def alike_but_for_a_number(x, w):
    h, n = x @ w, torch.arange(8)
    return [
        *(h + 1, h + 1.0, h + True, n + 1, n + 1.0, n + True, h + n),
        *(h + x.sum(), h + x, h.sum() + x, h.sum() + x.sum(), h.sum() * n),
        *(h.to(torch.float32), h.to(torch.float16), h.sum(dtype=torch.float64), h.sum(dtype=torch.float32)),
        *(torch.where(h > 0, h, 0.0), torch.where(h > 0, h, x), torch.where(h > 0, x, 1)),
    ]


def shapes_change_in_place(x, w):
    h, k = (x @ w).unsqueeze_(0), (x @ w).unsqueeze_(0)
    return h @ w, k.transpose_(0, 1) @ w, h.squeeze_(0) @ w


def lists(x, w):
    a, b = (x @ w).split(4, 1)
    c, d = x.split(4, 1)
    return a + c, torch.cat([a, c]), torch.cat([a, b]), torch.stack([c, d])


CASES = [layers, alike_but_for_a_number, shapes_change_in_place, lists]


def decided(f, policy):
    gm = captured(f, torch.randn(8, 8), torch.randn(8, 8))
    AssignPrecision(policy, on(LOW)).apply(gm)
    return [(n.name, n.meta["amp"].because, repr(n.meta["amp"].result)) for n in gm.graph.nodes]


@pytest.mark.parametrize("f", CASES)
@pytest.mark.parametrize("policy", [Policy(), Policy.parse("op matmul=fp32, op add=fp32")])
def test_decisions_are_those_of_computing_every_call(f, policy, monkeypatch):
    found = decided(f, policy)
    monkeypatch.setattr(dtype_memo, "_call", lambda *_: None)
    assert found == decided(f, policy)


def test_of_calls_that_are_alike_one_is_computed(monkeypatch):
    gm = captured(layers, torch.randn(8, 8), torch.randn(8, 8))
    computed = []
    result = dtype_memo.DtypeMemo.result

    def counted(self, node, decision, values, compute):
        return result(self, node, decision, values, lambda: computed.append(node.target) or compute())

    monkeypatch.setattr(dtype_memo.DtypeMemo, "result", counted)
    AssignPrecision(Policy(), on(LOW)).apply(gm)
    assert computed == [aten.matmul.default]


def test_a_result_that_differs_from_the_trace_is_computed_each_time():
    gm = captured(layers, torch.randn(8, 8), torch.randn(8, 8))
    AssignPrecision(Policy.parse("op matmul=fp32"), on(LOW)).apply(gm)
    found = [n.meta["amp"].result for n in gm.graph.find_nodes(op="call_function", target=aten.matmul.default)]
    assert {v.dtype for v in found} == {torch.float32} and len(set(map(id, found))) == len(found)
