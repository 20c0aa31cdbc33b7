"""What no graph widens, the wrapper around the call does: results share memory as before, the user's stay."""

import copy
import functools

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import ampcompile
from ampcompile.compiler import widen_outputs
from ampcompile.compiler.widen_nested import Widening
from tests.compiler.widened import Made, leaves, run, x
from tests.compiling import HIGH, LOW, dtypes, eager, error, same_bits
from tests.pairs import pairs

LINEAR = nn.utils.skip_init(nn.Linear, 8, 8)
MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.fixture(autouse=True)
def drawn() -> None:
    """Numbers of the test's own seed."""
    LINEAR.reset_parameters()


def widened(value):
    return Widening(LOW, list).of([value])


def test_what_holds_itself_or_nothing_low_is_returned_as_it_is():
    held: list = [torch.ones(2)]
    held.append(held)
    same = {"a": held, "b": (1, torch.ones(1)), "c": torch.Size([2])}
    assert widened(same) is same
    held.append(torch.ones(2, dtype=LOW))
    found = widened(held)
    assert found is not held and found[2].dtype == HIGH and held[2].dtype == LOW
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, dtype=LOW), torch.ones(2, dtype=LOW)])
    assert widened(packed).data.dtype == HIGH
    assert widened(torch.ones(3, 2, dtype=LOW).max(0)).values.dtype == HIGH


def base_and_view(x):
    y = LINEAR(x)
    return y, y[0]


def views_alone(x):
    y = LINEAR(x)
    return y[0], y[0:2]


def chunks(x):
    return LINEAR(x).chunk(2, -1)


def with_detached(x):
    y = LINEAR(x)
    return y, y.detach(), y[:, 1].detach()


def with_gaps(x):
    y = LINEAR(x)
    return y[:, ::2], y.t()[2:]


def nested(x):
    y = LINEAR(x)
    return {"a": y.view(-1)}, Made(y, [y[:, 1]]), CausalLMOutput(logits=y[:1])


def across_a_break(x):
    y = LINEAR(x)
    torch._dynamo.graph_break()
    return (y[0:1], y), LINEAR(x)


SHARING = [base_and_view, views_alone, chunks, with_detached, with_gaps, nested, across_a_break]


def gradients_after_a_write(results, f):
    LINEAR.zero_grad()
    results = [result for result in results if result.requires_grad]
    if f is not chunks:  # of which none may be written to, as eager mode has it
        results[0].mul_(2)
    sum((i + 1) * result.float().sum() for i, result in enumerate(results)).backward()
    return [LINEAR.weight.grad, LINEAR.bias.grad]


@pytest.mark.parametrize(
    ("f", "lower", "mode"),
    [
        *pairs(SHARING, ["aot_eager", "eager"], MODES),
        *((f, "inductor", torch.enable_grad) for f in (nested, across_a_break)),
    ],
)
def test_a_write_to_one_result_is_seen_in_those_that_share_its_memory_and_in_gradients(f, lower, mode):
    with torch.no_grad():
        for parameter in LINEAR.parameters():
            parameter.random_(-3, 4)  # no order of sums rounds them otherwise
    call, data = run(f, lower=lower), torch.randint(-3, 4, (2, 8)).float()
    for _ in range(2):
        with mode():
            found, expected = leaves(call(data)), leaves(eager(f, data))
        assert dtypes(found) == [HIGH] * len(expected)
        with torch.inference_mode(mode is torch.inference_mode), torch.no_grad():
            for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
                ours.fill_(i), theirs.fill_(i)
                assert all(torch.equal(a, b.float()) for a, b in zip(found, expected, strict=True))
    if mode is torch.enable_grad:
        ours, theirs = (gradients_after_a_write(leaves(g(data)), f) for g in (call, functools.partial(eager, f)))
        assert same_bits(ours, theirs), "of numbers that no sum rounds"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch 2.11's Dynamo
def test_what_has_hooks_of_its_own_is_cast_by_itself():
    seen = []

    def f(x):
        y = LINEAR(x)
        torch._dynamo.graph_break()
        part = y[0]
        part.register_hook(lambda gradient: seen.append(gradient.dtype))
        return y, part, y[1:]

    whole, part, other = run(f, lower="eager")(x())
    assert whole._base is part._base is None and other._base is whole
    (whole.sum() + part.sum()).backward()
    assert seen == [LOW]


def test_gradients_of_a_region_inside_a_call_without_are_kept():
    @torch.enable_grad()
    def f(x):
        y = LINEAR(x)
        return y, y[0]

    with torch.no_grad():
        whole, part = run(f)(x())
    (whole.sum() + part.sum()).backward()
    assert LINEAR.bias.grad.dtype == HIGH


@pytest.mark.parametrize("mode", MODES)
def test_what_was_given_is_returned_as_it_is_though_nobody_else_holds_it(mode):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.ones(2, dtype=LOW))

        def forward(self, what, given=None):
            torch._dynamo.graph_break()
            return self.kept if given is None else given[0] if what == "part" else given

    call, made = run(Keeps()), torch.ones(3, 2, dtype=LOW)
    with mode():
        assert call("itself").dtype == LOW
        assert call("itself", given=made.clone()).dtype == LOW
        assert dtypes(call("itself", (made.clone(), [made.clone()]))) == [LOW] * 2
        assert dtypes([call("part", [made[1:]]), call("part", ((made.clone(),),))]) == [LOW] * 2
        assert dtypes(call("itself", {"a": made.clone()})) == [LOW]


def unshared(x):
    y = LINEAR(x)
    torch._dynamo.graph_break()
    return {"a": CausalLMOutput(logits=y, hidden_states=(LINEAR(x).relu(), x)), "b": [Made(LINEAR(x))]}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("f", [unshared, lambda x: torch.cond(x.sum() > 9, LINEAR, lambda x: LINEAR(x) * 2, (x,))])
def test_the_users_tensors_are_not_even_listed_for_what_nobody_else_holds(f, mode, monkeypatch):
    call, data = run(f), x()
    with mode():
        call(data)  # in which Dynamo holds what it compiles with
    monkeypatch.setattr(widen_outputs, "_state", lambda module: pytest.fail("they are"))
    with mode():
        for _ in range(2):
            assert HIGH in dtypes(leaves(call(data)))


def test_what_others_hold_is_looked_at_and_copied():
    kept = []

    def f(x):
        y = LINEAR(x)
        output = CausalLMOutput(logits=y)
        kept.append(output)
        torch._dynamo.graph_break()
        return output, [y]

    output, (again,) = run(f)(x())
    assert output.logits is again and again.dtype == HIGH and kept[0] is not output
    assert kept[0].logits.dtype == kept[0]["logits"].dtype == LOW


def test_in_a_set_too():
    def f(x):
        y = LINEAR(x)
        return y, {y}, {LINEAR(x)}

    first, same, other = run(f)(x())
    assert same == {first} and dtypes([first, *same, *other]) == [HIGH] * 3


def test_explain_lists_them():
    report = ampcompile.explain(base_and_view)(x())
    cast = report.casts[-1]
    assert (cast.op, cast.dtype_from, cast.dtype_to, cast.shape) == ("output", LOW, HIGH, (2, 8)), "one cast for both"
    assert cast.because == widen_outputs.BECAUSE and cast.source.endswith(f":{base_and_view.__code__.co_firstlineno}")
    assert list(report.results) == [cast] and "results of the call" in str(report)
    assert not ampcompile.explain(LINEAR)(x()).results, "whose cast is in the graph"


@pytest.mark.parametrize("f", [LINEAR, base_and_view, across_a_break])
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
