"""Acting: a cast before every operand that a decision names, the regions gone, and the same bits as eager autocast."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ampcompile.passes.base import run_passes
from ampcompile.passes.before.insert_casts import CAST, InsertCasts
from ampcompile.passes.decide.assign_precision import AssignPrecision
from ampcompile.passes.graph import ENTER, EXIT, Regions, cast_of, is_castable, module_path, source_line
from ampcompile.policy import Policy
from tests.compiling import HALF, HIGH, LOW, text
from tests.passes.captured import captured, on
from tests.passes.tidied import ours

aten = torch.ops.aten
DECIDE = AssignPrecision(Policy(), on(LOW))


def act(gm, decide=DECIDE):
    return run_passes([decide, InsertCasts()], gm)[1].rewrites


def before(x, w):
    with torch.autocast("cpu", enabled=False):
        y = x @ w
    return (y @ w).softmax(-1) + x


def after(x, w):
    y = x @ w
    return (y.to(LOW) @ w.to(LOW)).softmax(-1) + x


def test_fires():
    x, w = torch.randn(3, 3), torch.randn(3, 3)
    gm = captured(before, x, w)
    assert act(gm) == 2
    assert not gm.graph.find_nodes(op="call_function", target=ENTER)
    assert not gm.graph.find_nodes(op="call_function", target=EXIT)
    calls = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    expected = [str(n.target) for n in captured(after, x, w, dtype=None).graph.nodes if n.op == "call_function"]
    assert sorted(calls) == sorted(expected)
    assert torch.equal(gm(x, w)[0], after(x, w))
    assert [n.meta["val"].dtype for n in gm.graph.find_nodes(op="placeholder")] == [HIGH] * 2, "inputs stay"


def test_declines_and_is_idempotent():
    linear = nn.Linear(3, 3)
    for f, inserted in ((lambda x: (x.to(LOW) @ x.to(LOW)).float(), 0), (lambda x: F.mse_loss(linear(x), x), 4)):
        gm = captured(f, torch.randn(3, 3))
        assert act(gm) == inserted
        printed = text(gm)
        assert act(gm) == 0
        assert text(gm) == printed


def test_casts_are_per_use_and_say_where_they_come_from():
    linear = nn.Linear(4, 4)
    gm = captured(lambda x: linear(linear(x)), torch.randn(2, 4))
    act(gm)
    found = ours(gm)
    assert [n.target for n in found] == [CAST] * 5
    assert len({n.args[0] for n in found}) == 3  # the weight and the bias twice each, in one graph
    records = [cast_of(n) for n in found]
    assert {r.op for r in records} == {"aten.linear"} and {r.fate for r in records} == {("inserted",)}
    assert all("lower_precision_fp" in r.because for r in records)
    assert all("test_insert_casts.py" in source_line(n) for n in found)
    assert all(n.meta["val"].dtype == LOW for n in found)
    assert {module_path(n) for n in found} == {
        module_path(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)[0])
    }


def test_results_are_narrowed_one_by_one_and_only_for_readers():
    gm = captured(lambda x: torch.std_mean(x @ x, -1), torch.randn(3, 3))
    act(gm, AssignPrecision(Policy.parse("op std_mean*=fp32_inside"), on(LOW)))
    (op,) = [n for n in gm.graph.nodes if n.name == "std_mean"]
    assert [v.dtype for v in op.meta["val"]] == [HIGH, HIGH]
    items = list(op.users)
    assert {n.target for n in items} == {operator.getitem} and all(n.meta["val"].dtype == HIGH for n in items)
    assert all([user.target for user in n.users] == [CAST] for n in items)
    assert {n.meta["val"].dtype for n in gm.graph.output_node().all_input_nodes} == {LOW}


def test_arguments_and_overloads_are_set():
    with torch._subclasses.FakeTensorMode():
        x = torch.randn(4, 4, device="cuda", dtype=HALF)
        gm = captured(lambda x: (x.softmax(-1), aten.norm.Scalar(x, 1), x.sum(0, dtype=HALF)), x, dtype=None)
    act(gm, AssignPrecision(Policy(), Regions({"cuda": (True, HALF)})))
    softmax, norm, total = gm.graph.output_node().args[0]
    assert softmax.kwargs == {"dtype": HIGH} and softmax.meta["val"].dtype == HIGH
    assert norm.target is aten.norm.ScalarOpt_dtype and norm.kwargs == {"dtype": HIGH}
    assert total.kwargs == {"dtype": HALF} and total.meta["val"].dtype == HALF


CASTABLE = {
    "float32": torch.ones(2),
    "float16": torch.ones(2, dtype=HALF),
    "a parameter": nn.Parameter(torch.ones(2, dtype=LOW)),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}
KEPT = {
    **{str(dtype): torch.ones(2, dtype=dtype) for dtype in (torch.float64, torch.complex64, torch.int64, torch.bool)},
    "8 bits": torch.ones(2).to(torch.float8_e5m2),
    "sparse": torch.eye(2).to_sparse(),
    "a subclass that holds other tensors": TwoTensor(torch.ones(2), torch.ones(2)),
    "a number": 1.0,
    "nothing": None,
}


@pytest.mark.parametrize("name", [*CASTABLE, *KEPT])
def test_what_may_be_cast(name):
    assert is_castable((CASTABLE | KEPT)[name]) is (name in CASTABLE)
