"""The verifier recomputes every dtype, and names the op that lies."""

import pytest
import torch

from ampcompile.passes.verify import verify
from tests.compiling import HIGH, LOW
from tests.passes.captured import captured


def graph():
    return captured(lambda x, y: (x @ y.to(torch.float64).float()).relu().sum(), torch.randn(3, 3), torch.randn(3, 3), dtype=None)


def test_an_honest_graph_passes():
    verify(graph())


def test_a_wrong_dtype_is_found_with_its_line():
    gm = graph()
    (relu,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    relu.meta["val"] = relu.meta["val"].to(LOW)
    with pytest.raises(AssertionError, match=r"relu.* claims torch.bfloat16, gives torch.float32 \(.*test_verify.py:\d+\)"):
        verify(gm)


def test_an_operand_in_another_dtype_than_the_op_was_computed_with_is_found():
    gm = graph()
    gm.graph.find_nodes(op="placeholder")[0].meta["val"] = gm.graph.find_nodes(op="placeholder")[0].meta["val"].to(LOW)
    with pytest.raises(Exception, match="dtype"):
        verify(gm)


def test_regions_not_yet_carried_out_are_passed_over():
    def f(x):
        with torch.autocast("cpu", enabled=False):
            return x @ x

    gm = captured(f, torch.randn(3, 3))
    gm.graph.output_node().args[0][0].meta["val"] = torch.empty(3, 3, dtype=LOW)
    verify(gm)
    assert HIGH
