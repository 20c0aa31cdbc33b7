"""Transforms of torch.func around a compiled callable give what they give around it under eager autocast.

Dynamo compiles nothing there: the callable runs eagerly, under the autocast of the call.
"""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from tests.compiling import LOW, eager, same_bits
from tests.models import Net


def loss(f):
    return lambda x: f(x).square().sum()


def weights(f):
    return {name: p.detach() for name, p in f.named_parameters()}


def loss_of_weights(f):
    return lambda weights, x: functional_call(f, weights, (x,)).square().sum()


def pulled_back(f, x):
    result, back = vjp(f, x)
    return result, back(result.cos())


TRANSFORMS = {
    "grad": lambda f, x: grad(loss(f))(x),
    "grad of grad": lambda f, x: grad(lambda x: grad(loss(f))(x).sin().sum())(x),
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),)),
    "vjp": pulled_back,
    "jacrev": lambda f, x: jacrev(f)(x[0]),
    "jacfwd": lambda f, x: jacfwd(f)(x[0]),
    "hessian": lambda f, x: hessian(loss(f))(x[0]),
    "vmap": lambda f, x: vmap(f)(x),
    "vmap of grad": lambda f, x: vmap(grad(loss(f)))(x),
    "grad of weights": lambda f, x: grad(loss_of_weights(f))(weights(f), x),
    "gradients of weights by row": lambda f, x: vmap(grad(loss_of_weights(f)), (None, 0))(weights(f), x),
    "ensemble": lambda f, x: vmap(lambda w: functional_call(f, w, (x,)))(
        {name: torch.stack([p, 2 * p]) for name, p in weights(f).items()}
    ),
}


@pytest.mark.parametrize("outputs", ["float32", "autocast"])
@pytest.mark.parametrize("lower", ["eager", "aot_eager"])
def test_transforms_have_the_bits_of_eager_autocast(lower, outputs):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(4, 8)
    wide = Net(lambda m, x: m.model(x).float(), model=model) if outputs == "float32" else model
    run = torch.compile(model, backend="amp", options={"lower": lower, "outputs": outputs})
    run(x).sum().backward()  # a compiled graph and copies of the weights are there
    for name, transform in TRANSFORMS.items():
        assert same_bits(transform(run, x), eager(transform, wide, x)), name
        with torch.autocast("cpu", LOW):
            assert same_bits(transform(run, x), eager(transform, model, x)), name
        model[0].weight.data *= 1.01  # a stale weight would show in what comes next
    assert same_bits(run(x).float(), eager(model, x).float())
