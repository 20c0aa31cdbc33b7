"""The verifier recomputes every dtype, and names the op that lies."""

import pytest
import torch

from ampcompile.passes.base import verify
from ampcompile.passes.graph import bodies
from tests.compiling import LOW
from tests.passes.captured import captured, settled


def graph():
    return settled(
        captured(
            lambda x, y: (x @ y.to(torch.float64).float()).relu().sum(),
            torch.randn(3, 3),
            torch.randn(3, 3),
            dtype=None,
        )
    )


def test_an_honest_graph_passes():
    verify(graph())


def test_a_wrong_dtype_is_found_with_its_line():
    gm = graph()
    (relu,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    relu.meta["val"] = relu.meta["val"].to(LOW)
    with pytest.raises(
        AssertionError, match=r"relu.* claims torch.bfloat16, gives torch.float32 \(.*test_verify.py:\d+\)"
    ):
        verify(gm)


def test_an_operand_in_another_dtype_than_the_op_was_computed_with_is_found():
    gm = graph()
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta["val"] = node.meta["val"].double()
    with pytest.raises(AssertionError, match=r"matmul.* claims torch.float32, gives torch.float64"):
        verify(gm)


def test_a_lie_in_a_body_is_found():
    from torch.utils.checkpoint import checkpoint

    gm = captured(lambda x: checkpoint(torch.sin, x, use_reentrant=False), torch.randn(3), dtype=None)
    verify(settled(gm))
    ((_, body),) = bodies(gm)
    (sin,) = body.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    sin.meta["val"] = sin.meta["val"].to(LOW)
    with pytest.raises(AssertionError, match=r"sin.* claims torch.bfloat16"):
        verify(gm)
