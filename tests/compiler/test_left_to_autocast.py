"""Graphs of tensors that hold others run as eager autocast runs them: its bits, its gradients, no copy of a weight."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ampcompile
from ampcompile.compiler.left_to_autocast import LEFT_TO_AUTOCAST
from ampcompile.errors import AmpWarning, UnsupportedError
from ampcompile.policy import Policy
from tests.compiling import HALF, HIGH, LOW, compiled, eager, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:TwoTensor does not implement _stable_hash_for_caching:UserWarning")


def twins(count):
    """The same model `count` times; half of its weights are tensors of two."""
    first = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    models = [copy.deepcopy(first) for _ in range(count)]
    for model in models:
        weight = model[0].weight.detach()
        model[0].weight = nn.Parameter(TwoTensor(weight.clone(), 2 * weight))
    return models


def ragged(model):
    def f(values, offsets):
        return model(torch.nested.nested_tensor_from_jagged(values, offsets)).values()

    return f


def parts(tensors):
    return [part for t in tensors for part in ((t.a, t.b) if isinstance(t, TwoTensor) else (t,))]


def step(model, run, x):
    """What a call returns, and the gradients; the weights are updated."""
    result = run(x)
    loss = result.float().square().sum()
    loss.backward()
    found = parts([result.detach(), *(p.grad for p in model.parameters())])
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    return found


@pytest.mark.parametrize(("lower", "dtype"), [("eager", HALF), ("aot_eager", LOW)])
def test_results_and_gradients_have_the_bits_of_eager_autocast(lower, dtype):
    theirs, ours, widened = twins(3)
    x = torch.randn(4, 8)
    run = torch.compile(ours, backend="amp", options={"lower": lower, "outputs": "autocast", "dtype": dtype})
    wide = torch.compile(widened, backend="amp", options={"lower": lower, "dtype": dtype})
    for _ in range(2):  # after an update of the weights, too
        expected = step(theirs, lambda x: eager(theirs, x, dtype=dtype), x)
        assert same_bits(step(ours, run, x), expected)
        found = step(widened, wide, x)
        assert same_bits(found[:2], [part.float() for part in expected[:2]]) and same_bits(found[2:], expected[2:])


def test_a_piece_before_a_graph_break_hands_on_low_precision():
    (model,) = twins(1)
    seen = []

    def f(x):
        y = model(x)
        torch._dynamo.graph_break()
        seen.append(y.dtype)
        return y * 2

    run, recorder = compiled(f, outputs="float32")
    x = torch.randn(4, 8)
    assert same_bits(parts([run(x)]), [part.float() for part in parts([eager(f, x)])]) and run(x).dtype == HIGH
    assert set(seen) == {LOW}
    targets = [node.target for each in recorder.graphs for node in each.graph.graph.nodes]
    assert not any(getattr(t, "__module__", "").startswith("ampcompile") for t in targets), "torch's caches know all"
    with torch.autocast("cpu", enabled=False):
        assert same_bits(parts([compiled(model)[0](x)]), parts([model(x)])), "in float32"
    x = TwoTensor(x.to(LOW), x.to(LOW))
    view, computed = torch.compile(lambda x: (x.t(), x.sin()), backend="amp", options={"lower": "aot_eager"})(x)
    assert view.dtype == LOW and view.a.data_ptr() == x.a.data_ptr() and computed.dtype == HIGH, "an input's memory"


def test_nested_tensors_can_be_made_in_the_graph():
    model = nn.Linear(8, 4)
    given = torch.randn(5, 8), torch.tensor([0, 2, 5])
    run, recorder = compiled(ragged(model))
    assert same_bits(run(*given), eager(ragged(model), *given)) and LEFT_TO_AUTOCAST in recorder.graphs[0].graph.meta
    x = torch.nested.nested_tensor_from_jagged(*given)
    run, recorder = compiled(lambda x: model(x).values())
    assert same_bits(run(x), eager(lambda x: model(x).values(), x)), "given as an input"
    assert LEFT_TO_AUTOCAST not in recorder.graphs[0].graph.meta


def test_weights_written_through_data_are_cast_again_elsewhere():
    plain, (model,) = nn.Linear(8, 8), twins(1)

    def write(x):
        plain.weight.data.mul_(2)
        return model(x)

    look, x = torch.compile(plain, backend="amp", options={"lower": "aot_eager"}), torch.randn(4, 8)
    write = torch.compile(write, backend="amp", options={"lower": "aot_eager"})
    with torch.no_grad():
        for _ in range(3):
            write(x)
            assert same_bits(look(x), eager(plain, x).float())


def test_a_second_derivative_is_refused_and_a_kept_graph_serves_again():
    (model,) = twins(1)
    x = torch.randn(4, 8, requires_grad=True)
    loss = compiled(model)[0](x).float().sum()
    first, again = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert same_bits(parts([first]), parts([again]))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(UnsupportedError, match="takes or returns tensor subclasses"):
        gradient.sum().backward()


def test_explain_and_the_log_say_it(caplog):
    (model,) = twins(1)
    with caplog.at_level(logging.INFO, "ampcompile"):
        report = ampcompile.explain(model)(torch.randn(4, 8))
    why = "cpu in bf16, left to autocast: it computes with TwoTensor, which ampcompile doesn't rewrite"
    assert caplog.messages == [why]
    assert f" graph 0 of 1: {why}" in " ".join(str(report).split()), "on as many lines as the terminal asks for"
    assert [cast.op for cast in report.casts] == ["output"] and not report.ops


def test_a_policy_that_is_not_followed_is_warned_of():
    (model,) = twins(1)
    with pytest.warns(AmpWarning, match=r"module 0=fp32.* left to autocast.* TwoTensor.* ampcompile.precision"):
        compiled(model, policy=Policy(modules=(("0", "fp32"),)))[0](torch.randn(4, 8))
    model[0] = ampcompile.keep_fp32(model[0])
    run, x = compiled(model)[0], torch.randn(4, 8)
    assert same_bits(parts([run(x)]), parts([eager(lambda x: model[2](model[1](model[0](x))), x)]))


def test_an_audit_compares_the_tensors_inside():
    (model,) = twins(1)
    audit = ampcompile.audit(model)(torch.randn(4, 8))
    assert len(audit.outputs) == 2 and all(1e-4 < error < 2e-2 for error in audit.outputs)
    assert {op.module for op in audit.ops} >= {"0", "1", "2"}
