"""Sizes as hints; asking for them guards nothing."""

import torch

from ampcompile.passes.analysis.sizes import elements_hint, is_float_tensor
from tests.passes.captured import captured


def value(f, *args):
    return captured(f, *args, dtype=None).graph.output_node().all_input_nodes[0].meta["val"]


def test_numbers():
    x = value(lambda x: x.sin(), torch.randn(3, 5))
    assert elements_hint(x) == 15 and elements_hint(None) == 1
    assert is_float_tensor(x) and not is_float_tensor(7)


def test_symbols_have_the_size_they_were_traced_with():
    x = torch.randn(3, 5)
    torch._dynamo.mark_dynamic(x, 0)
    found = value(lambda x: torch.cat([x, x]), x)
    assert isinstance(found.shape[0], torch.SymInt) and elements_hint(found) == 30


def test_what_depends_on_data_is_unknown():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = value(lambda x: x[x > 0].sin(), torch.randn(9))
    assert elements_hint(found) is None
