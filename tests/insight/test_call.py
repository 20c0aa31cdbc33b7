"""One more call leaves gradients, buffers, random states and what was compiled as they were, under whose options."""

import pytest
import torch
from torch import Tensor, nn

from ampcompile.config import Options
from ampcompile.insight.call import Subject, preserve_state
from ampcompile.torch_private.patches import uncompiled


def model_and_input() -> tuple[nn.Module, Tensor]:
    """A model whose first gradient is there already, with buffers; and an input that wants a gradient."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].weight.grad = torch.ones(3, 3)
    return model, torch.randn(4, 3, requires_grad=True)


@pytest.mark.parametrize("seen", ["called", "argument", "keyword"])
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(seen: str, fails: bool) -> None:
    model, x = model_and_input()
    given = model[0].weight.grad
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    f = model if seen == "called" else lambda *_, **__: None
    args = (x, [model]) if seen == "argument" else (x,)
    kwargs = {"model": model} if seen == "keyword" else {}
    try:
        with preserve_state(f, args, kwargs):
            assert model[0].weight.grad is None, "what the call adds up is its own"
            model(x).sum().backward()
            model[1].running_var = torch.zeros(3)
            torch.rand(3)
            assert x.grad is not None
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert model[0].weight.grad is given and torch.equal(given, torch.ones(3, 3))
    assert model[0].bias.grad is None and x.grad is None
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name][0] and torch.equal(buffer, buffers[name][1]), name
    assert torch.equal(torch.get_rng_state(), state)


def test_a_buffer_that_was_not_written_is_not_written_either() -> None:
    model, _ = model_and_input()
    versions = [buffer._version for buffer in model.buffers()]
    with preserve_state(model, (), {}):
        pass
    assert [buffer._version for buffer in model.buffers()] == versions


HALF = torch.float16


def test_options_of_what_was_compiled_for_us_are_used_and_those_given_by_name_beat_them() -> None:
    options = {"dtype": HALF, "weights": "every_call", "epilogue_fusion": True, "max_autotune": True}
    ours = torch.compile(lambda x: x @ x, backend="amp", options=options)
    assert Subject.of(ours, {}, None, None).options == Options.parse(options)
    found = Subject.of(ours, {"weights": "cached", "epilogue_fusion": False}, None, None).options
    assert (found.dtype, found.weights) == (HALF, "cached")
    assert dict(found.inductor) == {"epilogue_fusion": False, "max_autotune": True}
    other = torch.compile(lambda x: x @ x, backend="aot_eager", dynamic=True)
    subject = Subject.of(other, {}, None, None)
    assert subject.options == Options() and subject.dynamic and subject.f(torch.ones(1, 1)) == 1


class Own(nn.Module):
    """What torch.nn's own classes do isn't compiled in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_a_module_is_uncompiled_for_a_while_errors_or_not() -> None:
    model = Own()
    with uncompiled(model), uncompiled(abs):
        assert model._compiled_call_impl is None
    model.compile(backend="amp")
    compiled = model._compiled_call_impl
    with pytest.raises(KeyError), uncompiled(model):
        assert model._compiled_call_impl is None
        raise KeyError
    assert model._compiled_call_impl is compiled is not None
