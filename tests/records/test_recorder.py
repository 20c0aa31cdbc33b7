"""Totals are what is really converted: eager autocast is checked against eager autocast itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ampcompile
from benchmarks.models import GPT, GPTConfig
from tests.models import Net


class Counting(TorchDispatchMode):
    """Counts conversions between floating dtypes as they are executed."""

    casts = bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].is_floating_point() and result.is_floating_point():
            self.casts += 1
            self.bytes += args[0].nbytes + result.nbytes
        return result


def small_gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    tokens = torch.randint(32, (2, 8))
    return GPT(GPTConfig(layers=1, width=16, heads=2, vocab=32, context=8)), (tokens, tokens)


def reused() -> tuple[nn.Module, tuple[Tensor, ...]]:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, layer, nn.LayerNorm(8), layer), (torch.randn(3, 8),)


def checkpointed() -> tuple[nn.Module, tuple[Tensor, ...]]:
    inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    return Net(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=inner), (torch.randn(3, 8),)


CASES = {"gpt": small_gpt, "a layer used three times": reused, "checkpointed": checkpointed}


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.ci if c == "gpt" else ()) for c in CASES])
def test_casts_are_placed_as_eager_autocast_places_them(case: str) -> None:
    model, args = CASES[case]()
    found = ampcompile.explain(model, outputs="autocast")(*args).totals
    totals = {total.stage: total for total in found}
    with Counting() as forward, torch.autocast("cpu", cache_enabled=False):
        out = model(*args)
    with Counting() as backward:
        out.backward(torch.ones_like(out))
    if case == "checkpointed":  # its second forward is not counted, neither here nor in our graph
        backward.casts, backward.bytes = backward.casts - forward.casts, backward.bytes - forward.bytes
    for name, counted in (("forward", forward), ("backward", backward)):
        total = totals["insert_casts" if name == "forward" else "differentiated: backward"]
        assert (total.casts, total.bytes) == (counted.casts, counted.bytes) and total.casts
    if case == "gpt":
        assert found[-1].bytes < forward.bytes + backward.bytes, "ours casts less, forward and backward"


def test_each_pass_is_counted() -> None:
    report = ampcompile.explain(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)), outputs="autocast")(torch.randn(3, 8))
    totals = {total.stage: (total.casts, total.bytes) for total in report.totals}
    weights = 6 * (8 * 4 + 4 + 4 * 8 + 8)
    assert totals["insert_casts"] == (5, 6 * 3 * 8 + weights)
    assert totals["hoist_weights"] == (1, 6 * 3 * 8)
    assert totals["bind_weights, forward and backward"] == (5, 6 * 3 * 8 + weights), (
        "the input, and four gradients of weights"
    )
    every_call = ampcompile.explain(nn.Linear(8, 4), weights="every_call", outputs="autocast")(torch.randn(3, 8)).totals
    assert "hoist_weights" not in {total.stage for total in every_call}


def test_graphs_are_added_up_and_the_users_own_casts_count() -> None:
    def f(x: Tensor) -> Tensor:
        y = (x @ x).double()
        torch._dynamo.graph_break()
        return y.float() @ x

    report = ampcompile.explain(f, outputs="autocast")(torch.randn(4, 4))
    assert {t.stage: t.casts for t in report.totals}["insert_casts"] == 2 + 1 + 1 + 2
    assert len(report.graphs) == 2


def test_the_bodies_of_higher_order_ops_count_in_eager_autocast_as_in_our_graph() -> None:
    w = torch.randn(4, 4)

    def branches(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x @ w, lambda x: (x + 1) @ w, (x,))

    with torch.no_grad():
        totals = {t.stage: t.casts for t in ampcompile.explain(branches, outputs="autocast")(torch.randn(2, 4)).totals}
    assert totals["insert_casts"] == 4, "two products, in one branch each"
    assert totals["differentiated: backward"] == 0, "without gradients"
