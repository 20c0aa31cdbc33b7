"""What a rule means for one call: which operands, which arguments, which overload."""

import pytest
import torch

from ampcompile.passes.analysis.op_traits import set_arguments
from ampcompile.passes.decide.decisions import Call, decide
from ampcompile.rules.table import table
from ampcompile.torch_private.dispatcher import op_named
from tests.compiling import HIGH, LOW
from tests.passes.captured import captured

aten = torch.ops.aten


def call(f, *args, device="cpu"):
    """The last op of a function, as a call with the values that arrive at it."""
    gm = captured(f, *args, dtype=None)
    node = gm.graph.output_node().all_input_nodes[0]
    return Call(node, node.target, {n: n.meta["val"] for n in gm.graph.nodes if "val" in n.meta}, device)


A, B = torch.ones(3, 3), torch.ones(3, 3, dtype=LOW)


ASKING = [(name, rule) for name, rule in table("cuda").items() if rule.category.startswith(("fp32_append", "fp32_set"))]
ASKING = [row for row in ASKING if "name" not in row[0].lower()]  # names of dimensions don't pass through Dynamo


@pytest.mark.parametrize(("name", "rule"), ASKING, ids=[name for name, _ in ASKING])
def test_defaults_left_out_are_those_of_the_op_called(name, rule):
    """As few arguments as the op's schema allows: what is called instead gives the same numbers."""
    op = op_named(name)
    required = [a for a in op._schema.arguments if not a.has_default_value()]
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
