"""Backward runs in the dtype of its forward op wherever autocast sits; with `lower="eager"` as often as one likes."""

import copy

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


def scaled(outputs):
    return (outputs * 80000.0).sum()


def trained(model, x, where, **options):
    """Gradients of one step with autocast `where`: around all, inside alone, around backward alone, or absent."""
    model = copy.deepcopy(model)
    torch._dynamo.reset()
    run, _ = amp(model, dtype=HALF, **options)
    region = torch.autocast("cpu", HALF)
    if where == "outside":
        with region:
            scaled(run(x)).backward()
    elif where == "inside":
        with region:
            outputs = run(x)
        scaled(outputs).backward()
    elif where == "backward":
        loss = scaled(run(x))
        with region:
            loss.backward()
    else:
        scaled(run(x)).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("lower", ["aot_eager", "eager", pytest.param("inductor", marks=pytest.mark.ci)])
def test_a_float32_head_keeps_its_gradient_wherever_autocast_is(lower):
    model, x = with_a_float32_head(), torch.randn(2, 8)
    found = {where: trained(model, x, where, lower=lower) for where in ("absent", "outside", "inside", "backward")}
    for gradients in found.values():
        assert torch.equal(gradients[3], torch.full((4,), 160000.0))  # 80000 from each of two samples
        assert all(g.dtype == torch.float32 for g in gradients)
        assert torch.isfinite(gradients[2]).all() and gradients[2].abs().max() > 65504
        assert same_bits(gradients, found["absent"])


def test_outputs_that_are_inputs_or_views_or_written_in_place_keep_their_history():
    def f(x, y):
        x.mul_(2)
        return x, y, y[0], x + y, 3

    def run(function):
        torch.manual_seed(0)
        a, b = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
        x, y = a + 0, b + 0
        first, second, row, total, number = function(x, y)
        row.add_(1)
        (first.sum() * 3 + second.square().sum() + row.sum() + total.sum() * number).backward()
        return a.grad, b.grad, x

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


def test_inputs_that_are_functions_of_one_another_and_gradients_that_are_functions_of_results():
    def f(a, b):
        return a * b, a.t()[1:], (a.exp() + b).view(-1)

    def orders(run):
        torch.manual_seed(0)
        b = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
        a = b.square()
        product, view, total = run(a, b)
        loss = product.square().sum() + view.prod() + (total * total[0]).sum() + (product * a).sum()
        found = []
        for _ in range(3):
            (gradient,) = torch.autograd.grad(loss, b, create_graph=True)
            found.append(gradient)
            loss = gradient.square().sum()
        return found

    for lower in ("eager", "aot_eager"):
        for ours, expected in zip(orders(amp(f, lower=lower)[0]), orders(f), strict=True):
            torch.testing.assert_close(ours, expected)


def test_views_of_results_share_their_memory_and_history():
    run, _ = amp(lambda x: (h := x * 2, h[0], h.expand(2, 2, 3)), lower="eager")
    x = torch.randn(2, 3, requires_grad=True)
    whole, row, many = run(x)
    row.mul_(3)
    assert torch.equal(whole[0], x[0] * 6) and torch.equal(many[1, 0], x[0] * 6)
    (whole.sum() + many.sum()).backward()
    assert torch.equal(x.grad, torch.tensor([[18.0] * 3, [6.0] * 3]))


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
