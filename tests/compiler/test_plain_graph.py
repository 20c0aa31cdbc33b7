"""Backward runs in the dtype of its forward op wherever autocast sits; with `lower="eager"` as often as one likes."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn
from torch._higher_order_ops import while_loop
from torch.utils import _pytree as pytree

from tests.compiling import HALF, amp, compiled, same_bits
from tests.models import Net


def with_a_float32_head():
    """A half-precision body with a head whose gradient of 80000 no float16 can hold."""

    def forward(m, x):
        h = m.body(x).relu()
        with torch.autocast("cpu", enabled=False):
            return m.head(h.float())

    nn.init.ones_((body := nn.Linear(8, 8)).bias)
    return Net(forward, body=body, head=nn.Linear(8, 4))


@pytest.mark.parametrize("lower", ["aot_eager", "eager", pytest.param("inductor", marks=pytest.mark.ci)])
def test_a_float32_head_keeps_its_gradient_wherever_autocast_is(lower):
    """Around all of a step, around the call alone, around backward alone, or absent."""
    model, x, region, found = with_a_float32_head(), torch.randn(2, 8), torch.autocast("cpu", HALF), []
    run, _ = amp(model, dtype=HALF, lower=lower)
    for around_call, around_backward in product([region, nullcontext()], repeat=2):  # compiled in the region
        with around_call:
            loss = (run(x) * 80000.0).sum()
        with around_backward:
            found.append(torch.autograd.grad(loss, [*model.parameters()]))
    for gradients in found:
        assert torch.equal(gradients[3], torch.full((4,), 160000.0))  # 80000 from each of two samples
        assert all(g.dtype == torch.float32 for g in gradients)
        assert torch.isfinite(gradients[2]).all() and gradients[2].abs().max() > 65504
        assert same_bits(gradients, found[0])


@pytest.mark.parametrize("writes", [False, True], ids=["behind a node", "as it is: it writes to an input"])
def test_results_that_are_inputs_or_views_or_written_keep_their_memory_and_history(writes):
    def f(x, y):
        if writes:
            x.mul_(2)
        h = x + y
        return x, y, y[0], h, h[0], h.expand(2, 2, 3), 3

    def run(function):
        torch.manual_seed(0)
        a, b = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
        first, second, row, total, part, many, number = function(a + 0, b + 0)
        row.add_(1)
        part.mul_(3)
        loss = first.sum() * 3 + second.square().sum() + row.sum() + total.square().sum() * number + many.exp().sum()
        return [first, second, row, total, part, many, *torch.autograd.grad(loss, (a, b))]

    assert same_bits(run(compiled(f, lower="eager")[0]), run(f))


def test_unused_outputs_and_inputs_get_no_gradient():
    def f(x, y, z):
        return x * 2, y * 3, z

    x, y, z = (torch.randn(3, requires_grad=True) for _ in range(3))
    run, _ = amp(f, lower="eager")
    assert torch.autograd.grad(run(x, y, z)[0].sum(), (x, y, z), allow_unused=True)[1:] == (None, None)
    (_, b, _) = run(x, y, z)
    b.sum().backward()
    assert x.grad is None and z.grad is None and torch.equal(y.grad, torch.full((3,), 3.0))


def view_without_gradient(y):
    h = 2 * y
    with torch.no_grad():
        return h, h.view(-1), h.detach()


VIEWS = {
    "of another dtype": lambda y: (h := torch.complex(y, 2 * y), torch.view_as_real(h), h.real, h.conj().imag),
    "of pairs": lambda y: torch.view_as_complex((3 * y).view(2, 2, 2)),
    "several": lambda y: (h := 2 * y, *h.chunk(2), h[0].unfold(0, 2, 1), h.mT[1:].diagonal()),
    "without gradient": view_without_gradient,
    "written": lambda y: (h := 2 * y, v := h[0], v.mul_(3), h.add_(1)),
}


@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS)
def test_each_kind_of_view_is_what_it_is_in_eager_mode(views):
    def results(run):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        made = run(x)
        tensors = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in pytree.tree_leaves(made)]
        loss = sum((i + 2) * t.square().sum() for i, t in enumerate(tensors) if t.requires_grad)
        return [*tensors, *torch.autograd.grad(loss, x)]

    torch._dynamo.reset()
    assert same_bits(results(amp(views, lower="eager")[0]), results(views))


class Own(torch.autograd.Function):
    """Returns a view, or its input, with a gradient of its own."""

    @staticmethod
    def forward(ctx, x, way):
        double = x * 2
        return {"of a value": double.view(-1), "of an input": x.view_as(x), "an input": x}.get(way, (double, double[0]))

    @staticmethod
    def backward(ctx, *gradients):
        return -gradients[0].view(2, 4) if len(gradients) == 1 else 10 * gradients[0] + gradients[1] + 5, None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
@pytest.mark.parametrize("way", ["of a value", "of an input", "an input", "beside its base"])
@pytest.mark.parametrize("further", [lambda y: y, lambda y: y[0], lambda y: (y.view(-1)[1:], y.view(-1))])
def test_a_view_that_a_custom_function_returns_keeps_the_functions_gradient(way, further):
    def f(x):
        made = Own.apply(x, way)
        return further(made[1] if type(made) is tuple else made)

    def gradient(run):
        x = torch.ones(2, 4, requires_grad=True)
        loss = sum((i + 2) * result.square().sum() for i, result in enumerate(pytree.tree_leaves(run(x))))
        return torch.autograd.grad(loss, x)

    torch._dynamo.reset()
    assert same_bits(gradient(amp(f, lower="eager")[0]), gradient(f))


def test_a_loop_that_ends_in_a_view_has_gradients():
    def f(x):
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, (x * 2).t().t()), (torch.tensor(0), x))[1]

    x = torch.ones(2, 4, requires_grad=True)
    assert torch.equal(*torch.autograd.grad(amp(f, lower="eager")[0](x).sum(), x), torch.full((2, 4), 8.0))
