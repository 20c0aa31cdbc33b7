"""What runs on the graph after differentiation runs under the same contract as what runs before it."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from ampcompile.compiler.backend import rewrite
from ampcompile.compiler.lower import _inductor_config, lower
from ampcompile.config import Options
from ampcompile.kernels.packed_linear import LinearBlocks
from ampcompile.passes import base, pipeline
from ampcompile.passes.weight_copy import Slot
from tests.compiling import LOW, amp, eager, gradients


@dataclass(frozen=True)
class Fails:
    name: str = "fails"
    exact: bool = True
    fate: str = ""

    def apply(self, gm):
        raise KeyError("x")


@dataclass(frozen=True)
class Breaks:
    """Leaves a graph whose output comes before what it returns."""

    name: str = "breaks"
    exact: bool = True
    fate: str = ""

    def apply(self, gm):
        first = next(iter(gm.graph.nodes))
        first.append(gm.graph.output_node())
        return 1


@dataclass(frozen=True)
class Lies:
    name: str = "lies"
    exact: bool = True
    fate: str = ""

    def apply(self, gm):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.meta["val"] = node.meta["val"].double()
        return 1


LOWERS = pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
GRADIENTS = pytest.mark.parametrize("gradients", [True, False], ids=["joint", "inference"])


def call(lower, gradients, monkeypatch, *last):
    """Compile and run a function whose graph after differentiation meets `last` behind our own passes."""
    after = pipeline.after
    monkeypatch.setattr(pipeline, "after", lambda *products: (*after(*products), *last))
    x = torch.randn(4, 4, requires_grad=gradients)
    with torch.set_grad_enabled(gradients):
        return amp(lambda x: (x @ x).sin(), lower=lower)[0](x)


@LOWERS
@GRADIENTS
def test_an_error_names_the_pass_and_those_before_it(monkeypatch, lower, gradients):
    with pytest.raises(Exception, match=r"pass fails failed: KeyError: 'x'. Passes before it: bind_weights .*save_old"):
        call(lower, gradients, monkeypatch, Fails())


@LOWERS
@GRADIENTS
def test_a_broken_graph_is_found_after_the_pass_that_broke_it(monkeypatch, lower, gradients):
    with pytest.raises(Exception, match=r"pass breaks failed: RuntimeError"):
        call(lower, gradients, monkeypatch, Breaks())


@LOWERS
@GRADIENTS
def test_a_wrong_dtype_is_found_where_verifying_is_switched_on(monkeypatch, lower, gradients):
    monkeypatch.setattr(base, "VERIFY", True)
    with pytest.raises(Exception, match=r"pass lies failed: AssertionError: .*claims torch.float64, gives torch"):
        call(lower, gradients, monkeypatch, Lies())


@GRADIENTS
def test_a_watch_sees_the_graph_as_it_comes_and_after_each_pass(gradients):
    seen = []

    def backend(gm, example_inputs):
        graph = rewrite(gm, example_inputs, Options(lower="aot_eager")).graph
        return lower(graph, example_inputs, Options(lower="aot_eager"), lambda done, gm: seen.append((done, gm)))

    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.set_grad_enabled(gradients), torch.autocast("cpu", LOW):
        torch.compile(model, backend=backend)(x)
    assert [done for done, _ in seen] == [None, *pipeline.after(Options().emulated())]
    assert len({id(gm) for _, gm in seen}) == 1


@pytest.mark.parametrize(("numerics", "emulated"), [("eager", True), ("relaxed", False)])
def test_inductor_rounds_as_eager_does_unless_it_may_not(numerics: str, emulated: bool) -> None:
    gm = GraphModule({}, Graph())
    options = Options(numerics=numerics, inductor=(("max_autotune", True),))
    config = _inductor_config(gm, options, [Slot(0, LOW)])
    assert config["emulate_precision_casts"] is emulated and config["max_autotune"] is True
    assert "size_asserts" not in config
    assert _inductor_config(gm, options, [Slot(0, LOW), Slot(1, LOW, LinearBlocks())])["size_asserts"] is False
    mine = Options(inductor=(("emulate_precision_casts", False),))
    assert _inductor_config(gm, mine, [])["emulate_precision_casts"] is False, "the user's own word is the last"


@pytest.mark.parametrize("lower", ["eager", "aot_eager"])
@pytest.mark.parametrize("grad", [True, False])
def test_either_way_the_numbers_are_eager_autocasts(lower: str, grad: bool) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4)
    run, _ = amp(model, lower=lower)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            found: Tensor = run(x)
            assert torch.equal(found, eager(model, x)) and found.requires_grad == grad
            with torch.no_grad():
                model[0].weight.mul_(2)


@pytest.mark.ci
def test_a_cpp_wrapper_gives_gradients():
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    run = torch.compile(model, backend="amp", options={"cpp_wrapper": True})
    assert None not in gradients(model, lambda _: run(x).float().square().sum())
