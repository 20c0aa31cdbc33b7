"""After a call more than was asked for, gradients, buffers and random states are as before, errors or not."""

import pytest
import torch
from torch import Tensor, nn

from ampcompile.explaining.preserve_state import preserve_state


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
