"""What runs on the graph after differentiation runs under the same contract as what runs before it."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from ampcompile.compiler.backend import rewrite
from ampcompile.compiler.lower import lower
from ampcompile.config import Options
from ampcompile.passes import base, pipeline
from ampcompile.passes.analysis.wide_products import WideProducts
from tests.compiling import LOW, amp, gradients


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


@pytest.mark.parametrize("gradients", [True, False], ids=["joint", "inference"])
def test_a_watch_sees_the_graph_as_it_comes_and_after_each_pass(gradients):
    seen = []

    def backend(gm, example_inputs):
        graph = rewrite(gm, example_inputs, Options(lower="aot_eager")).graph
        return lower(graph, example_inputs, Options(lower="aot_eager"), lambda done, gm: seen.append((done, gm)))

    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.set_grad_enabled(gradients), torch.autocast("cpu", LOW):
        torch.compile(model, backend=backend)(x)
    assert [done for done, _ in seen] == [None, *pipeline.after(WideProducts.on_this_cpu(Options(lower="aot_eager")))]
    assert len({id(gm) for _, gm in seen}) == 1


@pytest.mark.ci
def test_a_cpp_wrapper_gives_gradients():
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    run = torch.compile(model, backend="amp", options={"cpp_wrapper": True})
    assert None not in gradients(model, lambda _: run(x).float().square().sum())
