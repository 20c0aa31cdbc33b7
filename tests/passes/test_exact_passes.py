"""Exact passes on random graphs, with views, writes, several results, mixed dtypes, symbolic sizes: the same bits."""

import copy

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ampcompile.passes.base import run_passes
from ampcompile.passes.before.fold_casts import FoldCasts
from ampcompile.passes.share_casts import ShareCasts
from tests.compiling import HALF, LOW, same_bits
from tests.passes.tidied import inserted, results

OPS = {
    "mm": torch.mm,
    "add": lambda a, b: a + b,
    "sin": lambda a, b: a.sin(),
    "float": lambda a, b: a.float(),
    "low": lambda a, b: a.to(LOW),
    "half": lambda a, b: a.to(HALF),
    "double": lambda a, b: a.double().float(),
    "t": lambda a, b: a.t(),
    "reshape": lambda a, b: a.t().reshape(a.shape),
    "repeat rows": lambda a, b: a[:1].expand(a.shape).contiguous(),
    "pad": lambda a, b: torch.nn.functional.pad(a[1:], (0, 0, 1, 0), value=0.5),
    "relu": lambda a, b: a.relu(),
    "clamp": lambda a, b: a.clamp(-0.5, 2.0),
    "write": lambda a, b: a.clone().mul_(2),
    "write a view": lambda a, b: (c := a.clone(), c[:2].add_(1), c)[2],
    "write what is repeated": lambda a, b: (c := a[:1].expand(a.shape).clone().view(a.shape), c[:2].add_(1), c)[2],
    "write what was read": lambda a, b: a.mul_(0.5) if not a.is_leaf and a._base is None else a + 1,
    "join": lambda a, b: torch.cat([a.float()[:3], b.float()[3:]]),
    "stack": lambda a, b: torch.stack([a.float(), b.float()])[1],
    "mask": lambda a, b: a.masked_fill(b > 0, 0.25).tril(),
    "index": lambda a, b: a[[0, 0, 1]].repeat(2, 1),
    "softmax": lambda a, b: a.softmax(-1),
    "loss": lambda a, b: torch.nn.functional.mse_loss(a, b, reduction="none"),
}
STEPS = st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=10)


def graph_of(steps):
    """A function of two square matrices that takes these steps; the last three values are its results."""

    def f(x, w):
        values = [x * 1, torch.mm(x, w), torch.mm(x, w).float()]
        for op, i, j in steps:
            values.append(OPS[op](values[-1 - i % len(values)], values[-1 - j % len(values)]))
        return tuple(value * 1 for value in values[-3:])

    return f


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.ci)])
@pytest.mark.parametrize("gradients", [True, False])
def test_the_same_bits_before_and_after(gradients, dynamic):
    rewrites = 0

    @settings(max_examples=12, deadline=None)
    @given(STEPS)
    @example([("float", 1, 0), ("mm", 0, 3), ("sin", 0, 0), ("sin", 0, 0)])  # folds, so that something is compared
    @example([("write a view", 0, 0), ("add", 0, 0), ("add", 0, 0), ("add", 0, 0), ("mm", 0, 3)])  # of a clone, cast
    @example([("write what is repeated", 0, 0), ("mm", 0, 3)])
    def holds(steps):
        nonlocal rewrites
        args = torch.randn(6, 6), torch.randn(6, 6)
        if dynamic:
            for arg in args:
                torch._dynamo.maybe_mark_dynamic(arg, 0)
                torch._dynamo.maybe_mark_dynamic(arg, 1)
        gm = inserted(graph_of(steps), *args)
        plain = [torch.randn(6, 6), torch.randn(6, 6)]
        extra = [6] * (len(gm.graph.find_nodes(op="placeholder")) - 2)
        inputs = _in_order(gm, plain, extra)
        try:
            before = results(copy.deepcopy(gm), inputs, gradients)
        except RuntimeError as error:  # autograd refuses: a value it needs was written into
            assert "in-place operation" in str(error) or "mul_" in str(error)
            return
        passes = [FoldCasts(gradients), ShareCasts(gradients)]
        rewrites += sum(done.rewrites for done in run_passes(passes, gm))
        assert same_bits(results(gm, inputs, gradients), before)

    holds()
    assert rewrites > 0


def _in_order(gm, tensors, numbers):
    """Inputs as the graph has them: sizes that are symbols come as inputs of their own."""
    tensors, numbers = iter(tensors), iter(numbers)
    vals = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    return tuple(next(tensors) if isinstance(value, torch.Tensor) else next(numbers) for value in vals)
