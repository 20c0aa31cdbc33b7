"""What leaves the outermost compiled callable: float32 where no autocast is open around it."""

import copy
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import CausalLMOutput

import ampcompile
from ampcompile.compiler import results
from ampcompile.compiler.results import Habits, Widening
from ampcompile.errors import AmpWarning
from tests.compiling import HALF, HIGH, LOW, compiled, dtypes, eager, error, regions, same_bits
from tests.devices import require_lstm
from tests.models import Net

LINEAR = nn.utils.skip_init(nn.Linear, 8, 8)
STORED = nn.Parameter(torch.empty(8, 8, dtype=LOW))
Pair = namedtuple("Pair", "first second")
MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.fixture(autouse=True)
def drawn() -> None:
    """Numbers of the test's own seed."""
    LINEAR.reset_parameters()
    nn.init.normal_(STORED)


@dataclass
class Made:
    """A container that pytree doesn't know."""

    value: Any
    values: list = field(default_factory=list)


def x():
    return torch.randn(2, 8)


def run(f, **options):
    return compiled(f, **{"outputs": "float32", **options})[0]


def leaves(values):
    """The tensors in a result, those in dataclasses too."""
    return [v for v in pytree.tree_leaves(_opened(values)) if isinstance(v, torch.Tensor)]


def _opened(value):
    if isinstance(value, dict):
        return {k: _opened(v) for k, v in value.items()}
    if is_dataclass(value):
        return [_opened(getattr(value, f.name)) for f in fields(value)]
    return [_opened(v) for v in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Frozen:
    value: Any


def in_one_graph(x):
    h = LINEAR(x)
    return h, h, h[0], h.view(-1), h.t(), torch.softmax(h, -1), h.exp().sum(), LINEAR(h)


def in_containers(x):
    h = LINEAR(x)
    g = h * 2
    output = CausalLMOutput(loss=h.sum(dtype=HIGH), logits=h, hidden_states=(h, LINEAR(h)))
    parts = {"a": [h, (g, None)], "b": Pair(g.t() + 1, 3), "view": g[0]}, Made(h, [g]), Frozen(h), OrderedDict(c=g)
    return *parts, (h.max(-1), "text"), output


def through_conditions(x):
    return torch.cond(x.sum() > 0, LINEAR, lambda x: LINEAR(x) * 2, (x,))


def after_a_break(x):
    h = LINEAR(x)
    torch._dynamo.graph_break()
    return LINEAR(h)


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


RETURNS = [in_one_graph, in_containers, through_conditions, across_breaks, in_inner_frames, of_itself, in_a_region]


@pytest.mark.parametrize(
    "f", [pytest.param(f, marks=pytest.mark.ci if f in (through_conditions, in_inner_frames) else ()) for f in RETURNS]
)
@pytest.mark.parametrize("lower", ["aot_eager", pytest.param("eager", marks=pytest.mark.ci)])
def test_what_leaves_is_eager_autocasts_as_float32_and_as_it_is_under_an_ambient_autocast(f, lower):
    call, data = run(f, lower=lower), x()
    expected = leaves(eager(f, data))
    for _ in range(2):
        found = call(data)
        assert same_bits(leaves(found), [value.float() if value.dtype == LOW else value for value in expected])
        assert type(found) is type(eager(f, data))
        with regions("ambient"):
            assert same_bits(leaves(call(data)), expected)
    kept = run(f, lower=lower)
    with regions("ambient"):
        assert same_bits(leaves(kept(data)), expected)
    assert same_bits(leaves(compiled(f, lower=lower)[0](data)), expected)  # outputs="autocast"


def own_tensors(m, low, written):
    written.copy_(LINEAR(low))
    if m.breaks:
        torch._dynamo.graph_break()
    return [low, low.t(), m.weight, m.weight[1], m.kept, STORED, STORED.t(), written, written[0], low + 1]


@pytest.mark.parametrize(("breaks", "lower"), [(False, "aot_eager"), (True, "aot_eager"), (False, "eager")])
def test_the_users_own_tensors_and_views_of_them_stay(breaks, lower):
    kept, stored = nn.Buffer(torch.randn(2, 8, dtype=LOW)), nn.Parameter(torch.randn(8, 8, dtype=LOW))
    model = Net(own_tensors, kept=kept, weight=stored, bias=nn.Parameter(torch.zeros(8)), breaks=breaks)
    low, written = x().to(LOW), torch.zeros(2, 8, dtype=LOW)
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


@pytest.mark.parametrize("breaks", [False, True])
def test_a_modules_hooks_see_what_they_see_in_eager_autocast(breaks):
    model, seen = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), []

    def hook(module, args, output):
        if breaks:
            torch._dynamo.graph_break()
        seen.append(output.dtype)

    model.register_forward_hook(hook)
    assert run(model)(x()).dtype == HIGH and seen == [LOW]


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
    call = run(lambda x: (LINEAR(x), torch.softmax(LINEAR(x), -1)), policy="op softmax*=low")
    assert dtypes(call(data)) == [HIGH, HIGH], "by a policy, too"


def test_a_region_that_disables_autocast_around_the_call_leaves_all_as_it_is():
    call = run(lambda x: (LINEAR(x), x.to(LOW) + 1))
    with regions("disabled"):
        assert dtypes(call(x())) == [HIGH, LOW]
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
    torch._dynamo.reset()
    call, recorder = compiled(lambda x: LINEAR(x).sum(dtype=HIGH), outputs="float32")
    call(x())
    with regions("ambient"):
        call(x())
    assert len(recorder.graphs) == 1, "inside and outside of autocast"


class Slots:
    """A class that nobody knows the parts of."""

    def __init__(self, value):
        self.value = value


def widened(value):
    return Widening(LOW, (), None, None, None, Habits(notes=False)).widen([value])


def test_what_holds_itself_or_nothing_low_is_returned_as_it_is():
    held: list = [torch.ones(2)]
    held.append(held)
    same = {"a": held, "b": (1, torch.ones(1)), "c": torch.Size([2]), "d": Made(3), "e": OrderedDict(f=Frozen(None))}
    assert widened(same) is same
    held.append(torch.ones(2, dtype=LOW))
    found = widened(held)
    assert found is not held and found[2].dtype == HIGH and held[2].dtype == LOW


def low():
    return torch.ones(2, dtype=LOW)


class Refuses(dict):
    def __copy__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize("container", [MappingProxyType({"a": low()}), {low()}, UserDict(a=low()), Refuses(a=low())])
def test_what_nobody_knows_how_to_copy_leaves_as_it_is_with_one_warning(container):
    results._warned.clear()  # of other tests
    with pytest.warns(AmpWarning, match=f"found a {type(container).__name__} among the results|Refuses .*Error: no"):
        assert widened([container])[0] is container
    assert widened([container])[0] is container
    held = Slots(low())
    assert widened(held) is held and held.value.dtype == LOW


@pytest.mark.parametrize("mode", MODES)
def test_a_model_in_16_bits_returns_16_bits_where_its_inputs_are_too(mode):
    model, ids = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 3)).to(LOW), torch.tensor([[1, 2]])
    with mode():
        assert run(model)(ids).dtype == run(model[1])(x().to(LOW)).dtype == LOW
        torch._dynamo.reset()
        assert run(model[1])(x()).dtype == HIGH, "what came in was float32"
        model[0].float()
        assert run(model)(ids).dtype == HIGH
        assert run(lambda a: a @ a.T)(x().to(LOW)).dtype == HIGH, "a function may read other weights"


def test_gradients_of_a_region_inside_a_call_without_are_kept():
    with torch.no_grad():
        whole = run(torch.enable_grad()(lambda x: LINEAR(x)))(x())
    whole.sum().backward()
    assert LINEAR.bias.grad.dtype == HIGH


def base_and_view(x):
    y = LINEAR(x)
    return y, y[0]


@pytest.mark.parametrize("f", [LINEAR, base_and_view, after_a_break])
def test_an_audit_follows_them_forward_and_backward(f, monkeypatch):
    data = x()
    audit = ampcompile.audit(f)(data)
    found = leaves(run(f)(data))
    twin = copy.deepcopy(LINEAR).double()
    monkeypatch.setitem(globals(), "LINEAR", twin)
    exact = leaves((twin if isinstance(f, nn.Linear) else f)(data.double()))
    assert audit.outputs == pytest.approx([error([a], [b]) for a, b in zip(found, exact, strict=True)])
    assert 0 < audit.gradient_error < 0.05
    assert "aten._to_copy" in [op.op for op in audit.ops if op.backward], "the cast rounds gradients"
