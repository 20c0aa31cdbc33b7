"""What runs on the graph after differentiation runs under the same contract as what runs before it. Around what is
lowered stand its copies of weights, up to date, and word of writes that nobody else tells."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule

from ampcompile import weights
from ampcompile.compiler.backend import rewrite
from ampcompile.compiler.lower import _fake_copy, _inductor_config, _invalidate_after, _with_copies, lower
from ampcompile.config import Options
from ampcompile.kernels.packed_conv import Blocks
from ampcompile.kernels.packed_linear import LinearBlocks
from ampcompile.passes import base, pipeline
from ampcompile.passes.weight_copy import Slot
from tests.compiling import LOW, amp, eager, gradients
from tests.weights.writers import unseen


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
    assert [done for done, _ in seen] == [None, *pipeline.after(Options().emulated())]
    assert len({id(gm) for _, gm in seen}) == 1


# What stands around it


def slot(weight: int, blocks: Blocks | None = None, on_trial: bool = False) -> Slot:
    return Slot(weight=weight, dtype=LOW, blocks=blocks, on_trial=on_trial)


@pytest.mark.parametrize("read", [[1], [2, 1]])
def test_a_graph_gets_its_copies_after_its_inputs(read: list[int]) -> None:
    inputs = torch.randn(2), nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(4))
    run = _with_copies(lambda *args: args, [slot(i) for i in read], Options())
    for _ in range(2):
        given = run(*inputs)
        assert given[:3] == inputs
        assert [copy.tolist() for copy in given[3:]] == [inputs[i].detach().to(LOW).tolist() for i in read]
        with torch.no_grad():
            inputs[1].add_(1)


@pytest.mark.parametrize("replayed", [False, True])
def test_copies_keep_their_addresses_where_cuda_graphs_replay(replayed: bool) -> None:
    weight = nn.Parameter(torch.randn(3))
    run = _with_copies(lambda *args: args, [slot(0)], Options(inductor=(("triton.cudagraphs", replayed),)))
    first = run(weight)[1]  # still held, as by a backward
    with torch.no_grad():
        weight.add_(1)
    assert (run(weight)[1].data_ptr() == first.data_ptr()) == replayed


def test_a_weight_on_trial_is_compared_first() -> None:
    tensor = torch.randn(3)
    run = _with_copies(lambda *args: args[1], [slot(0, on_trial=True)], Options())
    for _ in range(3):
        unseen(tensor)[1] += 1
        assert torch.equal(run(tensor), tensor.to(LOW))


def test_where_all_is_fake_the_copies_are_shapes() -> None:
    run = _with_copies(lambda *args: args, [slot(0), slot(0, LinearBlocks())], Options())
    with FakeTensorMode():
        weight = torch.empty(4, 6).t().requires_grad_()
        _, strided, packed = run(weight)
    assert [(c.dtype, c.shape, c.requires_grad) for c in (strided, packed)] == [(LOW, (6, 4), False)] * 2
    assert strided.stride() == (1, 6) and packed.stride() == (4, 1)
    assert _fake_copy(torch.empty(2, 3), slot(0)).dtype == LOW


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_graph_writes_below_autograd_is_cast_again(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(weights, "invalidate", told.append)

    def run(*args: Any) -> Any:
        assert not told, "once it has run"
        if fails:
            raise KeyError
        return args[0] * 2

    wrapped = _invalidate_after(run, [2, 0])
    if fails:
        with pytest.raises(KeyError):
            wrapped(1, 2, 3)
    else:
        assert wrapped(1, 2, 3) == 2
    assert told == [[3, 1]]


def test_of_what_a_graph_for_any_number_of_rows_writes_below_autograd_only_tensors_are_cast_again() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        found = torch.einsum("ij,jk->ik", x, w)
        part = found[:]
        found.data.mul_(0.5)
        return part

    run = torch.compile(f, backend="amp", dynamic=True, options={"lower": "eager", "outputs": "autocast"})
    w = torch.randn(8, 8)
    for rows in (4, 6):
        x = torch.randn(rows, 8)
        with torch.autocast("cpu"):
            expected = f(x, w)
        assert torch.equal(run(x, w), expected)


@pytest.mark.parametrize(("numerics", "emulated"), [("eager", True), ("relaxed", False)])
def test_inductor_rounds_as_eager_does_unless_it_may_not(numerics: str, emulated: bool) -> None:
    gm = GraphModule({}, Graph())
    options = Options(numerics=numerics, inductor=(("max_autotune", True),))
    config = _inductor_config(gm, options, [slot(0)])
    assert config["emulate_precision_casts"] is emulated and config["max_autotune"] is True
    assert "size_asserts" not in config
    assert _inductor_config(gm, options, [slot(0), slot(1, LinearBlocks())])["size_asserts"] is False
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
