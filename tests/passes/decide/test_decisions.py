"""What a rule means for one call: which operands, which arguments, which overload."""

import pytest
import torch
import torch.nn.functional as F

from ampcompile.passes.analysis.schema import set_arguments
from ampcompile.passes.decide.decisions import Call, decide
from ampcompile.rules.table import Rule, table
from ampcompile.torch_private.dispatcher import op_named
from tests.compiling import HALF, HIGH, LOW
from tests.passes.captured import captured

aten = torch.ops.aten


def call(f, *args, device="cpu"):
    """The last op of a function, as a call with the values that arrive at it."""
    gm = captured(f, *args, dtype=None)
    node = gm.graph.output_node().all_input_nodes[0]
    return Call(node, node.target, {n: n.meta["val"] for n in gm.graph.nodes if "val" in n.meta}, device)


A, B = torch.ones(3, 3), torch.ones(3, 3, dtype=LOW)


def test_arguments_are_bound_by_the_names_in_the_schema():
    found = call(lambda a, b: torch.addmm(a, b, b, alpha=2), A, A)
    assert list(found.arguments) == ["self", "mat1", "mat2", "alpha"] and found.arguments["alpha"] == 2
    assert found.arriving == [HIGH] * 3
    lists = call(lambda a, b: torch.cat([a, b, a]), A, B)
    assert lists.arriving == [HIGH, LOW, HIGH]


def test_operands_that_have_the_dtype_are_not_cast():
    found = decide(call(torch.add, A, B), Rule("lower_precision_fp", "why"), LOW)
    assert list(found.operands.values()) == [LOW]
    assert found.because == "why"


def test_what_is_written_kept_or_of_another_device_is_not_cast():
    def writes(a, b):
        a = a.clone()
        return a.index_copy_(0, torch.tensor([0, 1, 2]), b)

    found = decide(call(writes, A, B), Rule("follow_destination", "why"), LOW)
    assert list(found.operands.values()) == [HIGH]
    found = decide(call(torch.add, A, A * 1), Rule("lower_precision_fp", "why", keeps=("other",)), LOW)
    assert len(found.operands) == 1
    assert not decide(call(torch.add, A, A * 1, device="cuda"), Rule("lower_precision_fp", "why"), LOW).operands


def test_a_follower_takes_its_leaders_dtype():
    q = torch.randn(1, 1, 3, 8)
    rule = Rule("lower_precision_fp", "why", follows=(("attn_mask", "query"),))

    def attend(q, mask):
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    found = decide(call(attend, q, torch.randn(3, 3)), rule, LOW)
    assert set(found.operands.values()) == {LOW} and len(found.operands) == 2
    found = decide(call(attend, q.double(), torch.randn(3, 3)), rule, LOW)
    assert list(found.operands.values()) == [torch.float64]


def test_float32_is_asked_for_unless_the_user_asked_for_a_dtype():
    rule = Rule("fp32_set_opt_dtype", "why")
    assert decide(call(lambda b: b.sum(0), B), rule, LOW).arguments == {"dtype": HIGH}
    assert decide(call(lambda b: b.sum(0, dtype=HALF), B), rule, LOW).because == "the user asked for a dtype"
    norm = Rule("fp32_append_dtype", "why", redispatch="aten::norm.ScalarOpt_dtype")
    assert decide(call(torch.sum, B), norm, LOW).target is aten.norm.ScalarOpt_dtype


def test_what_repeats_a_cast_operand_is_dropped():
    rule = Rule("fp32", "why", drops=("alpha",))
    found = decide(call(lambda a, b: torch.add(a, b, alpha=2), B, B * 1), rule, LOW)
    assert found.arguments == {"alpha": None}
    assert decide(call(lambda a, b: torch.add(a, b, alpha=2), A, A * 1), rule, LOW).arguments == {}


def test_a_result_goes_low_or_back():
    assert decide(call(torch.sin, B), Rule("fp32_inside", "why"), HALF).narrow == HALF
    assert decide(call(torch.sin, B), Rule("fp32_round_trip", "why"), HALF).narrow == LOW
    assert decide(call(torch.sin, B), Rule("fp32", "why"), HALF).narrow is None


ASKING = [(name, rule) for name, rule in table("cuda").items() if rule.category.startswith(("fp32_append", "fp32_set"))]


@pytest.mark.parametrize(("name", "rule"), ASKING, ids=[name for name, _ in ASKING])
def test_defaults_left_out_are_those_of_the_op_called(name, rule):
    """As few arguments as the op's schema allows: what is called instead gives the same numbers."""
    op = op_named(name)
    required = [a for a in op._schema.arguments if not a.has_default_value()]
    if "name" in name.lower():
        pytest.skip("names of dimensions don't pass through Dynamo")
    values = {"int": 0, "number": 2, "Optional[number]": 2, "str": "fro", "List[int]": [0], "Optional[List[int]]": [0]}
    given = [values[str(a.type)] for a in required[1:]]
    decision = decide(call(lambda a: op(a, *given), A), rule, LOW)
    args, kwargs = set_arguments(decision.target or op, (A, *given), {}, decision.arguments)
    result = (decision.target or op)(*args, **kwargs)
    assert result.dtype == HIGH and decision.arguments["dtype"] == HIGH
    torch.testing.assert_close(result, op(A, *given))


def test_an_overload_without_the_defaults_is_given_them():
    rule = table("cuda")["aten::norm.ScalarOpt_dim"]
    decision = decide(call(lambda b: aten.norm.ScalarOpt_dim(b, 2, [0]), B), rule, LOW)
    assert dict(decision.arguments) == {"keepdim": False, "dtype": HIGH}
    given = decide(call(lambda b: aten.norm.ScalarOpt_dim(b, 2, [0], True), B), rule, LOW)
    assert dict(given.arguments) == {"dtype": HIGH}
