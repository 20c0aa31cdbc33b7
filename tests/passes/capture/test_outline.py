"""What can't be rewritten runs as it was written, under real autocast, and is listed; the rest is rewritten."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan

from ampcompile.passes.capture.outline import OUTLINED, OutlinedPart
from ampcompile.torch_private import dispatcher
from tests.compiling import HALF, HIGH, LOW, amp, dtypes, eager, regions, same_bits
from tests.models import Net
from tests.passes.together import All, errors, less_exact


def layers(run):
    return Net(run, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(2)))


def vmapped(m, x):
    h = m.layers[0](x)
    return torch.func.vmap(lambda row: m.layers[1](row).sin())(h) + h


def gradient(m, x):
    h = m.layers[0](x)
    return torch.func.grad(lambda row: m.layers[1](row).square().sum())(h) + h


def jvp(m, x):
    h = m.layers[0](x)
    out, tangent = torch.func.jvp(lambda row: m.layers[1](row).sin(), (h,), (torch.ones_like(h),))
    return out + tangent


def scanned(m, x):
    step = lambda carry, row: ((m.layers[0](row) + carry).to(x.dtype), m.layers[1](carry))
    carry, rows = scan(step, torch.zeros(8, dtype=x.dtype), x)
    return carry.sum() + rows


def associative(m, x):
    return m.layers[1](associative_scan(torch.add, m.layers[0](x), 0, combine_mode="generic"))


MODELS = {  # and what of theirs is left alone
    "vmapped": (vmapped, "_vmap_increment_nesting("),
    "gradient": (gradient, "_grad_increment_nesting("),
    "jvp": (jvp, "_jvp_increment_nesting("),
    "scanned": (scanned, "higher_order.scan("),
    "associative": (associative, "rhs"),  # which Dynamo takes apart
}
if dispatcher.TORCH < (2, 13):
    del MODELS["scanned"]  # AOTAutograd 2.11 can't differentiate such a scan, autocast or not: it finds aliases in it


def left_alone(recorder):
    nodes = [node for each in recorder.graphs for node in each.graph.graph.nodes]
    return [node for node in nodes if str(node.target).startswith(OUTLINED)]


def test_results_are_eager_autocasts_and_the_dispatchers_part_is_listed():
    model, x = All({name: layers(run) for name, (run, _) in MODELS.items()}), torch.randn(4, 8)
    run, recorder = amp(model)
    found, expected = run(x), eager(model, x)
    other = [name for name in MODELS if not same_bits(found[name], expected[name])]
    assert dtypes(found) == dtypes(expected)
    assert set(other) <= {"scanned", "associative"}  # which eager runs in another order
    parts = [getattr(recorder.graphs[0].graph, node.target) for node in left_alone(recorder)]
    code = "".join(part.graph_module.code for part in parts)
    assert [name for name, (_, call) in MODELS.items() if call not in code] == []
    for node, part in zip(left_alone(recorder), parts, strict=True):
        assert node.op == "call_module" and isinstance(part, OutlinedPart)
        assert not node.meta["amp"].known
        assert node.meta["amp"].because == "left to the dispatcher's own autocast"


def hooked(m, x):
    h = m.layers[0](x)
    h.register_hook(lambda gradient: gradient * 3)
    return m.layers[1](h)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo 2.11 does it itself
def test_gradients_are_as_exact_as_eager_autocasts_and_a_hook_on_an_activation_acts():
    models = {name: layers(run) for name, (run, _) in MODELS.items()} | {"hooked": layers(hooked)}
    assert less_exact(errors(models)[0]) == []


@pytest.mark.filterwarnings("ignore:.* runs in float32:ampcompile.AmpWarning")
def test_the_region_it_stands_in_is_the_one_it_runs_in():
    model = layers(gradient)

    def f(x):
        with torch.autocast("cpu", enabled=False):
            off = model(x)
        with torch.autocast("cpu", dtype=HALF):
            half = model(x)
        return off, half, model(x)

    x = torch.randn(4, 8)
    assert dtypes(eager(f, x)) == [HIGH, HALF, LOW]
    for around in ("absent", "half", "disabled"):
        run, recorder = amp(f, dtype=LOW)
        with regions(around):
            assert dtypes(run(x)) == [HIGH, HALF, HIGH if around == "disabled" else LOW]
        assert len(left_alone(recorder)) == 3
        torch._dynamo.reset()


def test_two_stretches_and_what_is_between_them_keep_their_order():
    def f(x):
        y = torch.func.vmap(torch.sin)(x)
        y.add_(1)
        z = torch.func.vmap(torch.cos)(y)
        x.mul_(2)
        return y, z, x

    a, b = torch.randn(4, 8), None
    b = a.clone()
    run, recorder = amp(f)
    assert same_bits(run(a), f(b)) and torch.equal(a, b)
    assert len(left_alone(recorder)) == 2


def jacobian(x, w):
    return torch.func.jacrev(lambda row: (row @ w).sum(0))(x)


def vjp(x, w):
    out, pull = torch.func.vjp(lambda row: (row @ w).sum(0), x)
    between = out @ w
    return between, pull(torch.ones_like(out))[0], pull(between)[0] @ w


def hessian(x, w):
    return torch.func.hessian(lambda row: (row @ w).square().sum())(x[:2])


@pytest.mark.parametrize(("f", "grad"), [(jacobian, False), (vjp, False), (vjp, True), (hessian, False)])
def test_a_gradient_asked_for_later_is_in_one_stretch_with_what_it_is_of(f, grad):
    x, w = torch.randn(4, 8, requires_grad=grad), torch.randn(8, 8, requires_grad=grad)
    run, recorder = amp(f)
    with torch.set_grad_enabled(grad):
        assert same_bits(run(x, w), eager(f, x, w))
    assert len(left_alone(recorder)) == 1
