"""Acting: a cast before every operand that a decision names, the regions gone, and the same bits as eager autocast."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ampcompile.passes.base import run_passes
from ampcompile.passes.before.insert_casts import CAST, InsertCasts
from ampcompile.passes.decide.assign_precision import AssignPrecision
from ampcompile.passes.graph import Regions, cast_of, is_castable, module_path, source_line
from ampcompile.policy import Policy
from tests.compiling import HALF, HIGH, LOW, eager, same_bits, text
from tests.passes.captured import captured, on
from tests.passes.tidied import ours, spelled

aten = torch.ops.aten


def act(gm, policy="", regions=None):
    return run_passes([AssignPrecision(Policy.parse(policy), regions or on(LOW)), InsertCasts()], gm)[1].rewrites


def region(x, w):
    with torch.autocast("cpu", enabled=False):
        y = x @ w
    return (y @ w).softmax(-1) + x


CASES = {  # a function of two matrices, a policy, how many casts are inserted, and all ops with what they give
    "a region": (region, "", 2, "matmul:f32 to:bf16 to:bf16 matmul:bf16 softmax:bf16 add:f32"),
    "casts by hand": (lambda x, w: (x.to(LOW) @ w.to(LOW)).float(), "", 0, "to:bf16 to:bf16 matmul:bf16 to:f32"),
    "a loss": (
        lambda x, w: F.mse_loss(F.linear(x, w), x),
        "",
        3,
        "to:bf16 to:bf16 linear:bf16 getitem:bf16 getitem:f32 to:f32 mse_loss:f32",
    ),
    # Results are narrowed one by one, and only for readers.
    "float32 inside": (
        lambda x, w: torch.std_mean(x @ w, -1),
        "op std_mean*=fp32_inside",
        5,
        "to:bf16 to:bf16 matmul:bf16 to:f32 getitem:f32 to:bf16 getitem:f32 to:bf16",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_casts_stand_before_what_is_decided(name):
    f, policy, casts, ops = CASES[name]
    x, w = torch.randn(3, 3), torch.randn(3, 3)
    gm = captured(f, x, w)
    assert act(gm, policy) == casts == len(ours(gm))
    assert " ".join(spelled(gm)) == ops
    assert [n.meta["val"].dtype for n in gm.graph.find_nodes(op="placeholder")] == [HIGH] * 2, "inputs stay"
    assert policy or same_bits(gm(x, w), [eager(f, x, w)])
    printed = text(gm)
    if f is not region:  # whose bounds are gone
        assert act(gm) == 0 and text(gm) == printed, "idempotent"


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
    (layer, _) = gm.graph.find_nodes(op="call_function", target=aten.linear.default)
    assert {module_path(n) for n in found} == {module_path(layer)}


def test_arguments_and_overloads_are_set():
    with torch._subclasses.FakeTensorMode():
        x = torch.randn(4, 4, device="cuda", dtype=HALF)
        gm = captured(lambda x: (x.softmax(-1), aten.norm.Scalar(x, 1), x.sum(0, dtype=HALF)), x, dtype=None)
    act(gm, regions=Regions({"cuda": (True, HALF)}))
    results = gm.graph.output_node().args[0]
    assert [node.kwargs for node in results] == [{"dtype": HIGH}, {"dtype": HIGH}, {"dtype": HALF}]
    assert [node.meta["val"].dtype for node in results] == [HIGH, HIGH, HALF]
    assert results[1].target is aten.norm.ScalarOpt_dtype


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


def test_what_may_be_cast():
    assert [name for name, value in (CASTABLE | KEPT).items() if is_castable(value)] == [*CASTABLE]
