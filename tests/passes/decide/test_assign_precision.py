"""Deciding: each op gets the dtype that eager autocast gives it, with a reason, and the graph stays as it is."""

import pytest
import torch
import torch.nn.functional as F

from ampcompile.errors import UnsupportedError
from ampcompile.passes.decide.assign_precision import AssignPrecision
from ampcompile.passes.graph import Regions
from ampcompile.policy import Policy
from ampcompile.rules.table import Rule
from ampcompile.torch_private import dispatcher
from tests.compiling import HALF, HIGH, LOW, amp, eager, same_bits, text
from tests.passes.captured import captured, on

ON, OFF = on(LOW), on(None)
aten = torch.ops.aten


def decisions(gm):
    return {node.name: node.meta["amp"] for node in gm.graph.nodes}


def block(x, w, m):
    h = F.layer_norm(x @ w, (8,))
    return F.cross_entropy(h, m), torch.cat([h, x]), h.relu() + x


def inputs():
    return torch.randn(4, 8), torch.randn(8, 8), torch.randint(8, (4,))


def test_fires_with_a_reason_for_every_node():
    gm = captured(block, *inputs())
    before = text(gm)
    assert AssignPrecision(Policy(), ON).apply(gm) == 3  # matmul, cross_entropy_loss, cat
    found = decisions(gm)
    assert all(decision.because for decision in found.values())
    assert set(found["matmul"].operands.values()) == {LOW}
    assert set(found["cat"].operands.values()) == set(found["cross_entropy_loss"].operands.values()) == {HIGH}
    assert found["layer_norm"].result.dtype == LOW and found["add"].result.dtype == HIGH
    assert found["relu"].because == "autocast leaves it alone: runs in the dtypes that arrive"
    assert "autocast's lower_precision_fp list (CPU)" in found["matmul"].because
    assert text(gm) == before  # decides, and touches nothing
    decided = {name: (d.because, dict(d.operands)) for name, d in found.items()}
    assert AssignPrecision(Policy(), ON).apply(gm) == 3
    assert decided == {name: (d.because, dict(d.operands)) for name, d in decisions(gm).items()}, "idempotent"


def test_declines_where_autocast_is_off_and_for_what_is_not_floating():
    gm = captured(block, *inputs(), dtype=None)
    assert AssignPrecision(Policy(), OFF).apply(gm) == 0
    assert decisions(gm)["matmul"].because == "autocast is off here"
    gm = captured(lambda x: (x @ x, x + 1), torch.randint(5, (3, 3)))
    assert AssignPrecision(Policy(), ON).apply(gm) == 0
    assert decisions(gm)["matmul"].because == "no floating operands"
    for dtype in (torch.complex64, torch.float64):
        gm = captured(lambda x: x @ x, torch.randn(3, 3, dtype=dtype))
        assert AssignPrecision(Policy(), ON).apply(gm) == 0


def test_a_composite_that_the_policy_names_stays_whole():
    run, recorder = amp(lambda x: torch.einsum("ij,kj->ik", x, x), policy="op einsum=fp32")
    assert run(torch.randn(3, 4)).dtype == HIGH
    assert "aten.einsum.default" in recorder.traced[0]


def test_float32_inside_gives_low_results():
    x = torch.randn(2, 8)
    product = eager(lambda x: x @ x.mT, x)
    run, _ = amp(lambda x: F.layer_norm(x @ x.mT, (2,)), policy="op layer_norm=fp32_inside")
    assert same_bits(run(x), F.layer_norm(product.float(), (2,)).to(LOW))
    torch._dynamo.reset()
    run, _ = amp(lambda x: torch.std_mean(x @ x.mT, -1), policy="op std_mean*=fp32_inside")
    assert same_bits(run(x), tuple(v.to(LOW) for v in torch.std_mean(product.float(), -1)))


class Banning(Policy):
    def rule_for(self, op, device_type, module_path=""):
        return Rule("banned", "for this test")


def test_a_banned_op_is_refused_with_its_line():
    gm = captured(lambda x: x @ x, torch.rand(3, 3))
    with pytest.raises(UnsupportedError, match=r"aten.matmul at .*test_assign_precision.py:\d+ is unsafe"):
        AssignPrecision(Banning(), ON).apply(gm)


def test_a_users_own_casts_stay():
    x = torch.randn(3, 4)

    def f(x):
        return x.to(LOW).to(HIGH), x.half().double(), x.type_as(x.to(LOW)), x.to(LOW).float() + 1

    # Inductor 2.11 keeps roundings inside a kernel only on CUDA, whatever it is told.
    for lower in ("aot_eager", "inductor") if dispatcher.TORCH >= (2, 13) else ("aot_eager",):
        torch._dynamo.reset()
        assert same_bits(amp(f, lower=lower)[0](x), f(x))


def test_an_accelerators_rule_leaves_the_cpu_number_that_waits_for_it():
    states = {"cuda": (True, HALF), "cpu": (False, LOW)}
    with torch._subclasses.FakeTensorMode():
        x, scale = torch.randn(4, 4, device="cuda", dtype=HALF), torch.tensor(3.0)
        gm = captured(lambda x, s: (x * s).pow(2).sum(), x, scale, dtype=None)
    AssignPrecision(Policy(), Regions(states)).apply(gm)
    found = decisions(gm)
    assert not found["mul"].operands and set(found["pow_1"].operands.values()) == {HIGH}
    assert found["sum_1"].result.dtype == HIGH and not found["sum_1"].operands
