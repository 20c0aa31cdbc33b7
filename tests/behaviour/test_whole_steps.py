"""Whole training steps in one compiled function: forward, backward, scaler and optimizer."""

import copy

import pytest
import torch
from torch import nn

import ampcompile
from tests.compiling import LOW

pytestmark = [
    pytest.mark.filterwarnings("ignore:Profiler record function"),
    pytest.mark.filterwarnings("ignore:.*will be ignored:UserWarning"),
]
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "adamw, foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
    "adamw, fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=10.0),
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def with_backward(module, optimizer, x):
    module(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def with_gradients(module, optimizer, x):
    loss = module(x).float().square().mean()
    params = list(module.parameters())
    for param, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


def scaled_by(scaler):
    def step(module, optimizer, x):
        scaler.scale(module(x).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def trained(step, make, **compiled):
    """A model's parameters after three steps of a compiled function."""
    torch._dynamo.reset()
    module = model()
    optimizer = make(module.parameters())
    run = torch.compile(step, **compiled)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        run(module, optimizer, torch.randn(6, 8, generator=generator))
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def equal_to_stock(make_step, make, lower):
    with torch.autocast("cpu", LOW, cache_enabled=False):
        expected = trained(make_step(), make, backend="aot_eager")
    found = trained(make_step(), make, backend="amp", options={"lower": lower})
    untrained = nn.utils.parameters_to_vector(model().parameters()).detach()
    assert (expected - untrained).abs().max() > 0.02
    # The gradients of weights are summed in float32 here, in bfloat16 there; Adam makes steps of their signs.
    assert (found - expected).norm() < 0.05 * (expected - untrained).norm()


@pytest.mark.parametrize(
    ("step", "optimizer", "lower"),
    [
        (lambda: with_backward, "sgd", "aot_eager"),
        (lambda: with_backward, "adamw", "eager"),
        pytest.param(lambda: with_backward, "adamw", "inductor", marks=pytest.mark.slow),
        (lambda: with_gradients, "adamw", "aot_eager"),
        (lambda: scaled_by(torch.amp.GradScaler("cpu", init_scale=8.0)), "adamw", "aot_eager"),
        (lambda: scaled_by(ampcompile.GradScaler("cpu", init_scale=8.0)), "adamw", "aot_eager"),
    ],
)
def test_a_step_with_backward_and_optimizer(step, optimizer, lower):
    equal_to_stock(step, OPTIMIZERS[optimizer], lower)


@pytest.mark.parametrize("lower", ["aot_eager", pytest.param("eager", marks=pytest.mark.ci)])
def test_a_step_with_compiled_autograd(lower):
    with torch._dynamo.config.patch(compiled_autograd=True):
        equal_to_stock(lambda: with_backward, OPTIMIZERS["sgd"], lower)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("sgd", "adamw, foreach") else pytest.mark.ci) for n in OPTIMIZERS]
)
def test_an_optimizers_step_alone_is_bit_for_bit_what_stock_gives(name):
    results = []
    for backend, options in (("aot_eager", {}), ("amp", {"options": {"lower": "aot_eager"}})):
        torch._dynamo.reset()
        module = model()
        optimizer = OPTIMIZERS[name](module.parameters())
        step = torch.compile(optimizer.step, backend=backend, **options)
        for i in range(3):
            for param in module.parameters():
                param.grad = torch.full_like(param, 0.1 * (i + 1))
            step()
        state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        results.append([*module.parameters(), *state])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_a_compiled_optimizer_holds_is_no_constant():
    """Its graph has parameters as attributes: one above float16's range today need not be tomorrow."""
    weight = nn.Parameter(torch.full((4, 4), 1e5))
    weight.grad = torch.full((4, 4), 1e5)

    class Product(torch.optim.SGD):
        def step(self):
            with torch.no_grad():
                (param,) = self.param_groups[0]["params"]
                param.copy_(param @ param.grad)

    optimizer = Product([weight], lr=1.0)
    torch.compile(optimizer.step, backend="amp", options={"lower": "aot_eager", "dtype": torch.float16})()
    assert weight.isinf().all()


def test_the_copies_of_a_whole_step_follow_its_writes():
    """The step's own writes are seen by another graph that reads the same weights."""
    module, x = model(), torch.randn(6, 8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    read = torch.compile(module, backend="amp", options={"lower": "aot_eager"})
    step = torch.compile(with_backward, backend="amp", options={"lower": "aot_eager"})
    for _ in range(3):
        with torch.no_grad():
            before = read(x)
        step(module, optimizer, x)
        with torch.no_grad(), torch.autocast("cpu", LOW):
            assert torch.equal(read(x), copy.deepcopy(module)(x)) and not torch.equal(read(x), before)


def test_explain_passes_over_the_backward_of_compiled_autograd():
    module, x = model(), torch.randn(6, 8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    with torch._dynamo.config.patch(compiled_autograd=True):
        report = ampcompile.explain(with_backward, lower="aot_eager")(module, optimizer, x)
    assert "linear" in report.code
