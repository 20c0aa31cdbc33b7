"""What runs on the graph after differentiation runs under the same contract as what runs before it."""

import pytest
import torch

from ampcompile.passes import base
from tests.compiling import amp, change_passes, gradients
from tests.passes.rewriting import Acts, fail, lie


def swap(gm):
    """Leaves a graph whose output comes before what it returns."""
    next(iter(gm.graph.nodes)).append(gm.graph.output_node())


@pytest.mark.parametrize(
    ("act", "lower", "gradients", "said"),
    [
        (fail, "aot_eager", False, "KeyError: 'x'. Passes before it: bind_weights .*save_old"),
        (fail, "inductor", True, "KeyError: 'x'. Passes before it: bind_weights .*save_old"),
        (swap, "aot_eager", True, "RuntimeError"),
        (lie, "inductor", False, "AssertionError: .*claims torch.float64, gives torch"),
    ],
)
def test_a_pass_that_fails_or_breaks_its_graph_or_lies_is_named(monkeypatch, act, lower, gradients, said):
    """A function is compiled and run whose graph after differentiation meets the pass behind our own."""
    change_passes(monkeypatch, add=[Acts("wrong", act)])
    monkeypatch.setattr(base, "VERIFY", True)
    x = torch.randn(4, 4, requires_grad=gradients)
    with pytest.raises(Exception, match=f"pass wrong failed( at .*)?: {said}"), torch.set_grad_enabled(gradients):
        amp(lambda x: (x @ x).sin(), lower=lower)[0](x)


@pytest.mark.ci
def test_a_cpp_wrapper_gives_gradients():
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    run = torch.compile(model, backend="amp", options={"cpp_wrapper": True})
    assert None not in gradients(model, lambda _: run(x).float().square().sum())
