"""Free ops go where the fewest bytes are cast: never worse than any other way, and never seen from outside."""

import itertools
import time

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ampcompile
from ampcompile.passes.base import run_passes
from ampcompile.passes.decide.assign_precision import AssignPrecision
from ampcompile.passes.decide.place_casts import HIGH, PlaceCasts
from ampcompile.policy import Policy
from tests.compiling import HALF, LOW, amp, compiled, dtypes, eager
from tests.passes.captured import captured, on

OFF = PlaceCasts(gradients=False, fuses=False, is_weight=lambda index, node: False)
ON = PlaceCasts(gradients=True, fuses=False, is_weight=lambda index, node: False)
FUSING = PlaceCasts(gradients=False, fuses=True, is_weight=lambda index, node: False)


def placed(f, *args, each=OFF, dtype=LOW):
    gm = captured(f, *args, dtype=dtype)
    assign = AssignPrecision(Policy(), on(dtype), range_guards=False)
    moved = run_passes([assign, each, assign], gm)[1].rewrites
    return gm, moved


def ran_in(gm):
    """Op names with the type of their results."""
    ops = [n for n in gm.graph.nodes if n.op == "call_function" and isinstance(n.meta["amp"].result, torch.Tensor)]
    return {n.name: n.meta["amp"].result.dtype for n in ops}


def fans_out(x, w):
    y = x.sin().expand(4, 8, 8).reshape(32, 8) * 1.5
    return torch.mm(y, w) + torch.mm(y.relu(), w)


def test_fires():
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    gm, moved = placed(fans_out, x, w)
    assert moved == 4
    assert [name for name, dtype in ran_in(gm).items() if dtype == HIGH] == ["sin"]
    assert sum(len(n.meta["amp"].operands) for n in gm.graph.nodes) == 3  # sin's result and w twice


DECLINES = {
    "nothing to save": lambda x, w: torch.mm(x.sin().relu(), w),
    "seen from outside": lambda x, w: (y := x.sin().expand(4, 8, 8), torch.mm(y.reshape(32, 8), w))[0::1],
    "written": lambda x, w: torch.mm((y := x.sin().repeat(4, 1)).add_(1), w) + y.relu()[:1, :1],
    "on an accelerator's fp32 list": lambda x, w: torch.mm(x[:1].expand(8, 8).exp(), w),
    "no low precision anywhere": lambda x, w: x.sin().expand(4, 8, 8).relu() + w,
}


@pytest.mark.parametrize("name", DECLINES)
def test_declines(name):
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    gm, _ = placed(DECLINES[name], x, w)
    ops = ran_in(gm)
    assert all(dtype == HIGH for op, dtype in ops.items() if op in ("sin", "expand", "exp", "relu", "add_", "mul"))


def test_is_idempotent():
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    gm, _ = placed(fans_out, x, w)
    assert OFF.apply(gm) == 0 or {n.meta["amp"].because[:6] for n in gm.graph.nodes} >= {"placed"}
    before = ran_in(gm)
    run_passes([AssignPrecision(Policy(), on(LOW), False)], gm)
    assert ran_in(gm) == before


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["sin", "mul", "add", "view", "grow", "mm", "softmax"]), st.integers(0, 99), st.integers(0, 99)
    ),
    min_size=2,
    max_size=7,
)


def random_graph(steps):
    """A function of two matrices that takes these steps; each reads results of steps before it."""

    def f(x, w):
        values = [x, w, torch.mm(x, w)]
        for op, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(
                {
                    "sin": lambda a, b: a.sin(),
                    "mul": lambda a, b: a * 1.5,
                    "add": lambda a, b: a + b,
                    "view": lambda a, b: a.t(),
                    "grow": lambda a, b: a[:1].expand(8, 8),
                    "mm": torch.mm,
                    "softmax": lambda a, b: torch.nn.functional.mse_loss(a, b, reduction="none"),
                }[op](a, b)
            )
        return values[-1] * 1

    return f


@settings(max_examples=25, deadline=None)
@given(STEPS, st.sampled_from([OFF, ON, FUSING]))
@example([("sin", 0, 0), ("sin", 0, 0), ("add", 47, 63), ("mm", 0, 93), ("grow", 19, 0)], OFF)
def test_no_other_placement_casts_fewer_bytes(steps, each):
    f, x, w = random_graph(steps), torch.randn(8, 8), torch.randn(8, 8)
    gm = captured(f, x, w)
    run_passes([AssignPrecision(Policy(), on(LOW), range_guards=False)], gm)
    placement = each.placement(gm)
    if placement is None or not placement.free:
        return
    cost = placement.cost(placement.cut())
    assert cost <= placement.cost(placement.free), "never above eager autocast"
    ways = itertools.product((HIGH, LOW), repeat=len(placement.free))
    least = min(
        placement.cost(labels)
        for way in ways
        if placement._narrow_where_nothing_is_wide(dict(labels := dict(zip(placement.free, way, strict=True))))
        == labels
    )
    assert cost == least


def test_results_are_of_eagers_dtypes_and_near():
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    for dtype in (LOW, HALF):
        torch._dynamo.reset()
        found, expected = amp(fans_out, dtype=dtype, placement="bytes")[0](x, w), eager(fans_out, x, w, dtype=dtype)
        assert dtypes(found) == dtypes(expected)
        assert torch.allclose(found.float(), expected.float(), rtol=0.05, atol=0.2)


def test_explain_says_why_in_symbols():
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    torch._dynamo.mark_dynamic(x, 0)

    def f(x, w):
        y = x.sin().expand(4, x.shape[0], 8) * 1.5
        return torch.matmul(y, w) + torch.matmul(y.relu(), w)

    report = ampcompile.explain(f, placement="bytes")(x, w)
    reasons = [op.because for op in report.ops if op.op == "aten.mul"]
    assert any(
        r.startswith("placed in bf16 by a minimum cut over bytes cast; a cast of it costs 192*s") for r in reasons
    )


def test_dynamic_shapes_are_compiled_once():
    w = torch.randn(8, 8)

    def f(x, w):
        y = x.sin().expand(4, x.shape[0], 8) * 1.5
        return torch.matmul(y, w) + torch.matmul(y.relu(), w)

    run, recorder = compiled(f, dynamic=True, placement="bytes")
    for rows in (6, 5, 300):
        run(torch.randn(rows, 8), w)
    assert len(recorder.graphs) == 1


@pytest.mark.slow
def test_ten_thousand_nodes_take_seconds():
    def f(x, w):
        for _ in range(1400):
            y = (x.sin() * 1.5).relu()
            x = x + torch.mm(y, w) + torch.mm(y.t(), w)
        return x

    x, w = torch.randn(4, 4), torch.randn(4, 4)
    gm = captured(f, x, w)
    run_passes([AssignPrecision(Policy(), on(LOW))], gm)
    start = time.process_time()
    ON.apply(gm)
    assert len(gm.graph.nodes) > 9_500 and time.process_time() - start < 30
