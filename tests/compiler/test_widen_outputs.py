"""What leaves the outermost compiled callable: float32 where no autocast is open around it."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import ampcompile
from ampcompile.compiler import widen_outputs
from ampcompile.compiler.widen_nested import Widening
from ampcompile.torch_private import dispatcher
from tests.compiler.widened import Made, leaves, run, x
from tests.compiling import HALF, HIGH, LOW, compiled, dtypes, eager, gradients, regions, same_bits
from tests.devices import require_lstm

LINEAR = nn.utils.skip_init(nn.Linear, 8, 8)
STORED = nn.Parameter(torch.empty(8, 8, dtype=LOW))
Pair = namedtuple("Pair", "first second")


@pytest.fixture(autouse=True)
def drawn() -> None:
    """Numbers of the test's own seed."""
    LINEAR.reset_parameters()
    nn.init.normal_(STORED)


@dataclass(frozen=True)
class Frozen:
    value: Any


@pytest.fixture
def outside(monkeypatch):
    """How often the wrapper around a call had to look for something to widen."""
    calls = []
    widened = Widening.of
    monkeypatch.setattr(Widening, "of", lambda self, result: calls.append(result) or widened(self, result))
    return calls


def in_one_graph(x):
    h = LINEAR(x)
    return h, torch.softmax(h, -1), h.exp().sum()


def in_containers(x, of=lambda g: g.t() + 1):
    h = LINEAR(x)
    g = h * 2
    return {"a": [h, (g, None)], "b": Pair(of(g), 3)}, Made(h, [g]), Frozen(h), OrderedDict(c=g), (h.max(-1), "text")


def in_containers_with_a_view(x):
    return in_containers(x, lambda g: g[0])


def as_model_output(x):
    h = LINEAR(x)
    return CausalLMOutput(loss=h.sum(dtype=HIGH), logits=h, hidden_states=(h, LINEAR(h)))


def as_aliases(x):
    h = LINEAR(x)
    return h, h, h[0], h.view(-1), h.t()


def through_conditions(x):
    return torch.cond(x.sum() > 0, LINEAR, lambda x: LINEAR(x) * 2, (x,))


def after_a_break(x):
    h = LINEAR(x)
    torch._dynamo.graph_break()
    return LINEAR(h)


ONE_GRAPH = [in_one_graph, in_containers, as_model_output, after_a_break]
"""What the last graph widens itself."""


def across_breaks(x):
    h = LINEAR(x)
    hs = [h]
    torch._dynamo.graph_break()
    g = LINEAR(h)
    torch._dynamo.graph_break()
    return {"a": hs, "b": (g, LINEAR(g)), "c": Made(h)}


def in_inner_frames(x):
    def inner(x):
        h = LINEAR(x)
        torch._dynamo.graph_break()
        assert h.dtype == LOW
        return LINEAR(h)

    h = inner(x)
    assert h.dtype == LOW
    return LINEAR(h), h


def of_itself(x, times=2):
    if times:
        torch._dynamo.graph_break()
        h = of_itself(x, times - 1)
        assert h.dtype == LOW
        return h
    return LINEAR(x)


def in_a_region(x):
    with torch.autocast("cpu", LOW):
        h = LINEAR(x)
        torch._dynamo.graph_break()
        return LINEAR(h), h


BY_THE_WRAPPER = [
    in_containers_with_a_view,
    as_aliases,
    through_conditions,
    across_breaks,
    in_inner_frames,
    of_itself,
    in_a_region,
]


@pytest.mark.parametrize("f", ONE_GRAPH + BY_THE_WRAPPER)
@pytest.mark.parametrize("lower", ["aot_eager", pytest.param("eager", marks=pytest.mark.ci)])
def test_what_leaves_is_eager_autocasts_as_float32_and_as_it_is_under_an_ambient_autocast(f, lower, outside):
    call, data = run(f, lower=lower), x()
    expected = leaves(eager(f, data))
    for _ in range(2):
        found = call(data)
        assert same_bits(leaves(found), [value.float() if value.dtype == LOW else value for value in expected])
        assert type(found) is type(eager(f, data))
        by_the_wrapper = f in BY_THE_WRAPPER or (f is as_model_output and dispatcher.TORCH >= (2, 15))
        assert by_the_wrapper or not outside, "the cast is part of the graph"
        with regions("ambient"):
            assert same_bits(leaves(call(data)), expected)
    kept = run(f, lower=lower)
    with regions("ambient"):
        assert same_bits(leaves(kept(data)), expected)
    assert same_bits(leaves(compiled(f, lower=lower)[0](data)), expected)  # outputs="autocast"


def test_one_graph_for_calls_that_widen_and_one_for_those_that_do_not():
    call, recorder = compiled(in_one_graph, outputs="float32")
    for _ in range(3):
        call(x())
        with regions("ambient"):
            call(x())
    assert len(recorder.graphs) == 2
    call, recorder = compiled(lambda x: LINEAR(x).sum(dtype=HIGH), outputs="float32")  # nothing to widen
    call(x())
    with regions("ambient"):
        call(x())
    assert len(recorder.graphs) == 1


@pytest.mark.parametrize("lower", ["aot_eager", "eager", "inductor"])
def test_gradients_are_those_of_a_float_after_eager_autocast(lower):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    data, target = x(), torch.randn(2, 4)
    expected = gradients(model, lambda m: nn.functional.mse_loss(eager(m, data).float(), target) * 3)
    call = run(model, lower=lower)
    found = gradients(model, lambda _: nn.functional.mse_loss(call(data), target) * 3)
    if lower == "inductor":
        assert all(torch.allclose(a, b, atol=2e-2) for a, b in zip(found, expected, strict=True))
    else:
        assert same_bits(found, expected)


class OwnTensors(nn.Module):
    def __init__(self, breaks):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=LOW))
        self.register_buffer("kept", torch.randn(2, 8, dtype=LOW))
        self.breaks = breaks

    def forward(self, low, written):
        written.copy_(LINEAR(low))
        if self.breaks:
            torch._dynamo.graph_break()
        return [low, low.t(), self.weight, self.weight[1], self.kept, STORED, STORED.t(), written, written[0], low + 1]


@pytest.mark.parametrize(("breaks", "lower"), [(False, "aot_eager"), (True, "aot_eager"), (False, "eager")])
def test_the_users_own_tensors_and_views_of_them_stay(breaks, lower):
    model, low, written = OwnTensors(breaks), x().to(LOW), torch.zeros(2, 8, dtype=LOW)
    own = [low, low, model.weight, model.weight, model.kept, STORED, STORED, written, written]
    call = run(model, lower=lower)
    for _ in range(2):
        *found, computed = call(low, written)
        assert computed.dtype == HIGH and torch.equal(computed, (low + 1).float())
        assert dtypes(found) == [LOW] * len(own)
        assert all(
            a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a, b in zip(found, own, strict=True)
        )
        assert all(found[i] is own[i] for i in (0, 2, 4, 5, 7))
    assert torch.equal(written, eager(LINEAR, low))


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.last, self.seen = nn.Linear(8, 8), None, []

    def forward(self, x, given):
        h = self.linear(x)
        self.last = Made(h)
        given.append(h)
        self.seen.append(h * 2)
        return h, self.seen, given


def test_what_stays_inside_keeps_low_precision():
    model, given = Remembers(), []
    h, seen, returned = run(model)(x(), given)
    assert dtypes([h, seen, returned]) == [HIGH] * 3
    assert dtypes([model.last.value, model.seen, given]) == [LOW] * 3
    assert seen is not model.seen and returned is not given


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch 2.11's Dynamo
def test_what_closures_and_hooks_hold_keeps_low_precision():
    seen = []

    def f(x):
        h = LINEAR(x)
        h.register_hook(lambda gradient: seen.append(gradient.dtype))
        return (lambda: h), h

    remembered, h = run(f)(x().requires_grad_())
    h.sum().backward()
    assert remembered().dtype == LOW and h.dtype == HIGH and seen == [LOW]


def test_a_modules_hooks_see_what_they_see_in_eager_autocast():
    seen = []
    for breaks in (False, True):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

        def hook(module, args, output, breaks=breaks):
            if breaks:
                torch._dynamo.graph_break()
            seen.append(output.dtype)

        model.register_forward_hook(hook)
        assert run(model)(x()).dtype == HIGH
        torch._dynamo.reset()
    assert seen == [LOW, LOW]


def test_a_graph_compiled_for_the_outermost_call_serves_calls_inside_another_one_too():
    seen = []

    def inner(x):
        return LINEAR(x)

    def outer(x):
        torch._dynamo.graph_break()
        h = inner(x)
        seen.append(h.dtype)
        torch._dynamo.graph_break()
        return LINEAR(h)

    data = x()
    for first in (inner, outer):
        torch._dynamo.reset()
        # One backend, so that Dynamo gives both what it has compiled of `inner`.
        calls = {f: torch.compile(f, backend="amp", options={"lower": "aot_eager"}) for f in (inner, outer)}
        for f in (first, inner, outer, inner):
            assert same_bits(calls[f](data), eager(f, data).float())
    assert set(seen) == {LOW}


def test_compiled_callables_in_compiled_ones_hand_on_low_precision():
    seen = []
    block = run(LINEAR)

    @torch.compiler.disable
    def not_compiled(x):
        h = block(x)
        seen.append(h.dtype)
        return h

    assert run(lambda x: LINEAR(not_compiled(x)))(x()).dtype == HIGH
    assert run(lambda x: LINEAR(block(x)))(x()).dtype == HIGH  # inlined
    assert seen == [LOW] and block(x()).dtype == HIGH


class Block(nn.Linear):
    """With a `forward` of its own: what torch.nn's classes do isn't compiled in place."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


def test_blocks_compiled_one_by_one_work_with_eager_code_between():
    model = nn.Sequential(Block(8, 8), nn.LayerNorm(8), Block(8, 8), nn.Linear(8, 3))
    data = x()
    expected = model(data)
    for layer in (model[0], model[2]):
        layer.compile(backend="amp", options={"lower": "aot_eager"})
    found = model(data)
    assert dtypes([found]) == [HIGH] and torch.allclose(found, expected, atol=0.05)
    assert found.detach().numpy().dtype == "float32"
    with regions("ambient"):
        assert model[0](data).dtype == LOW


class Residual(Block):
    def forward(self, x):
        return x * 1.1 + super().forward(x)


@pytest.fixture
def one_process(request):
    """A process group of this process alone."""
    dist = pytest.importorskip("torch.distributed.pipelining") and torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("in_place", [False, True])
def test_stages_of_a_pipeline_but_the_last_hand_on_low_precision(in_place):
    from torch.distributed.pipelining import PipelineStage

    parts, data = nn.Sequential(Block(8, 8), Residual(8, 8)), x()
    expected = gradients(parts, lambda m: eager(m, data).float().square().sum())
    if in_place:
        compiled_parts = parts
        for part in parts:
            part.compile(backend="amp", options={"lower": "aot_eager"})
    else:
        compiled_parts = map(run, parts)
    stages = [PipelineStage(part, i, 2, torch.device("cpu")) for i, part in enumerate(compiled_parts)]

    def through_stages(_):
        h = stages[0].forward_maybe_with_nosync(data)
        assert h.dtype == LOW
        return stages[1].forward_maybe_with_nosync(h).square().sum()

    assert same_bits(gradients(parts, through_stages), expected)
    assert stages[1].forward_maybe_with_nosync(data).dtype == stages[0].submod(data).dtype == HIGH


def test_only_the_calls_own_type_is_widened():
    half = ampcompile.precision(HALF)(LINEAR.forward)

    def f(x):
        with torch.autocast("cpu", HALF):
            h = LINEAR(x)
        return h, LINEAR(x).half(), half(x), LINEAR(x), LINEAR(x).to(LOW)

    data = x()
    assert dtypes(run(f)(data)) == [HALF] * 3 + [HIGH] * 2
    torch._dynamo.reset()
    assert dtypes(run(f, dtype=HALF)(data)) == [HIGH] * 4 + [LOW]


def test_a_region_that_disables_autocast_around_the_call_leaves_all_as_it_is():
    call = run(lambda x: (LINEAR(x), x.to(LOW) + 1))
    with regions("disabled"):
        assert dtypes(call(x())) == [HIGH, LOW]
    assert dtypes(call(x())) == [HIGH, HIGH]


def test_a_policy_that_makes_something_low_does_not_hide_it():
    policy = ampcompile.Policy(ops=(("softmax*", "low"),))
    call = run(lambda x: (LINEAR(x), torch.softmax(LINEAR(x), -1)), policy=policy)
    assert dtypes(call(x())) == [HIGH, HIGH]


def test_pieces_that_run_eagerly_are_widened_too():
    require_lstm()
    lstm = nn.LSTM(8, 8)
    output, (hidden, cell) = run(lstm)(x()[None])
    assert dtypes([output, hidden, cell]) == [HIGH] * 3


def test_symbolic_sizes_need_no_more_graphs():
    call, recorder = compiled(in_one_graph, dynamic=True, outputs="float32")
    for rows in (2, 3, 5):
        data = torch.randn(rows, 8)
        assert same_bits(call(data), [value.float() for value in eager(in_one_graph, data)])
    assert len(recorder.graphs) == 1


def test_the_cast_is_in_inductors_kernel():
    from torch._inductor.utils import run_and_get_code

    def f(x):
        return torch.relu(LINEAR(x) + 1)

    with torch.no_grad():
        _, (code,) = run_and_get_code(run(f, lower="inductor"), torch.randn(64, 8))
        torch._dynamo.reset()
        _, (kept,) = run_and_get_code(run(f, lower="inductor", outputs="autocast"), torch.randn(64, 8))
    assert code.count('extern "C"') == kept.count('extern "C"') >= 1


def test_explain_shows_the_cast_with_its_reason():
    report = ampcompile.explain(LINEAR)(x())
    cast = report.casts[-1]
    assert (cast.op, cast.dtype_from, cast.dtype_to, cast.because) == ("output", LOW, HIGH, widen_outputs.BECAUSE)
    assert widen_outputs.BECAUSE.split(":")[0] in str(report)
    with regions("ambient"):
        assert "output" not in [c.op for c in ampcompile.explain(LINEAR)(x()).casts]
