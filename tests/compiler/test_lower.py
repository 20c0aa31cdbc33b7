"""What runs on the graph after differentiation runs under the same contract as what runs before it."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.fx import GraphModule

from ampcompile.passes import base, pipeline
from tests.compiling import amp, gradients


def fails(gm):
    raise KeyError("x")


def breaks(gm):
    """Leaves a graph whose output comes before what it returns."""
    next(iter(gm.graph.nodes)).append(gm.graph.output_node())


def lies(gm):
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
        node.meta["val"] = node.meta["val"].double()


@dataclass(frozen=True)
class Wrong:
    act: Callable[[GraphModule], None]
    name: str = "wrong"
    exact: bool = True
    fate: str = ""

    def apply(self, gm):
        self.act(gm)
        return 1


@pytest.mark.parametrize(
    ("act", "lower", "gradients", "said"),
    [
        *(
            (fails, lower, gradients, "KeyError: 'x'. Passes before it: bind_weights .*save_old")
            for lower in ("aot_eager", "inductor")
            for gradients in (True, False)
        ),
        (breaks, "aot_eager", True, "RuntimeError"),
        (breaks, "inductor", False, "RuntimeError"),
        (lies, "aot_eager", True, "AssertionError: .*claims torch.float64, gives torch"),
        (lies, "inductor", False, "AssertionError: .*claims torch.float64, gives torch"),
    ],
)
def test_a_pass_that_fails_or_breaks_its_graph_or_lies_is_named(monkeypatch, act, lower, gradients, said):
    """A function is compiled and run whose graph after differentiation meets the pass behind our own."""
    after = pipeline.after
    monkeypatch.setattr(pipeline, "after", lambda *products: (*after(*products), Wrong(act)))
    monkeypatch.setattr(base, "VERIFY", True)
    x = torch.randn(4, 4, requires_grad=gradients)
    with pytest.raises(Exception, match=f"pass wrong failed: {said}"), torch.set_grad_enabled(gradients):
        amp(lambda x: (x @ x).sin(), lower=lower)[0](x)


@pytest.mark.ci
def test_a_cpp_wrapper_gives_gradients():
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    run = torch.compile(model, backend="amp", options={"cpp_wrapper": True})
    assert None not in gradients(model, lambda _: run(x).float().square().sum())
