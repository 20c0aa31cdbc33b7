"""A traced backward is differentiable once gradients are on in it, unless it reads what has no history."""

import pytest
import torch

from ampcompile.compiler.double_backward import copy_with_bodies
from ampcompile.passes.replay import EnableSecondBackward, has_closed_backward
from tests.compiler.test_double_backward import Grows, Hides
from tests.passes.rewriting import rewritten

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does


@pytest.mark.parametrize(("function", "opens"), [(Grows, True), (Hides, False)])
def test_fires_where_what_is_saved_has_a_history(function, opens):
    shapes = [(3,), ()] if function is Grows else [(3,)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    (found,) = rewritten(lambda *xs: function.apply(*xs), *inputs)
    graph = copy_with_bodies(found.graph)
    assert has_closed_backward(graph)
    assert EnableSecondBackward().apply(graph) == int(opens)
    assert has_closed_backward(graph) is not opens
    assert EnableSecondBackward().apply(graph) == 0
    assert has_closed_backward(copy_with_bodies(found.graph))  # the original


def test_declines_where_there_is_none():
    (found,) = rewritten(lambda x: x.sin(), torch.randn(3, requires_grad=True))
    assert EnableSecondBackward().apply(found.graph) == 0 and not has_closed_backward(found.graph)
