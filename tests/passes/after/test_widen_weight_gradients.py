"""Gradients of weights leave their product as float32: which products, on which devices, with which numbers."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import ampcompile
from ampcompile.passes.after.widen_weight_gradients import WidenWeightGradients
from ampcompile.passes.base import run_passes
from ampcompile.torch_private import dispatcher
from tests.compiling import HALF, HIGH, LOW, amp, draws, error, gradients
from tests.models import Net, weight
from tests.passes.tidied import layouts, traced, words

aten = torch.ops.aten


def joint(f, *shapes, device="cuda", dtype=LOW) -> GraphModule:
    """The graph of `f(*primals, tangents)` on a device that need not be there; the last shape is the tangents'."""
    gm = traced(f, *(torch.empty(shape, dtype=dtype) for shape in shapes), device=device)
    last = list(gm.graph.find_nodes(op="placeholder"))[-1]
    last.target = last.name = "tangents_1"
    return gm


FIRES = {  # a gradient, and its ops afterwards
    "a linear layer's": (lambda x, t: torch.mm(t.t(), x).t().t().float(), "t mm t t"),
    "times a view": (lambda x, t: torch.mm(t.t(), x).view(-1, 4).float(), "t mm view"),
    "behind the cast": (lambda x, t: torch.mm(t.t(), x).float().t(), "t mm t"),
    "a sum's terms": (
        lambda x, t: torch.mm(t.t(), x).float() + torch.mm(t.t(), x * 2).t().t().float(),
        "t mm t mul mm t t add",
    ),
    "a batch": (lambda x, t: torch.bmm(t.t().unsqueeze(0), x.unsqueeze(0)).float(), "t unsqueeze unsqueeze bmm"),
}


@pytest.mark.parametrize("dtype", [LOW, HALF])
@pytest.mark.parametrize("name", FIRES)
def test_fires_on_what_is_only_returned(name, dtype):
    f, ops = FIRES[name]
    gm = joint(f, (6, 8), (6, 4), dtype=dtype)
    before = layouts(gm)
    assert run_passes([WidenWeightGradients()], gm)[0].rewrites == ops.count("mm")
    assert words(gm) == ops and layouts(gm) == before
    products = [node for node in gm.graph.nodes if "mm" in str(node.target)]
    assert {node.target for node in products} <= {aten.mm.dtype, aten.bmm.dtype}
    assert {node.meta["val"].dtype for node in products} == {HIGH}
    assert WidenWeightGradients().apply(gm) == 0


DECLINES = {
    "forward's": lambda x, y, t: (torch.mm(x.t(), y).float(), t * 2),
    "used in the middle": lambda x, y, t: torch.mm(t.t(), x).float().exp(),
    "used in 16 bits as well": lambda x, y, t: ((g := torch.mm(t.t(), x)).float(), g * 2),
    "scaled in 16 bits": lambda x, y, t: (torch.mm(t.t(), x) * 0.3).float(),
    "returned in 16 bits": lambda x, y, t: torch.mm(t.t(), x),
    "to float64": lambda x, y, t: torch.mm(t.t(), x).double(),
    "to the host": lambda x, y, t: torch.mm(t.t(), x).to("cpu", HIGH),
    "summed in 16 bits": lambda x, y, t: (torch.mm(t.t(), x) + torch.mm(t.t(), y)).float(),
    "added to": lambda x, y, t: torch.addmm(x.narrow(0, 0, 4), t.t(), y).float(),
    "repeated": lambda x, y, t: torch.mm(t.t(), x).expand(2, 4, 8).float(),
}


@pytest.mark.parametrize("name", DECLINES)
def test_declines(name):
    gm = joint(DECLINES[name], (6, 8), (6, 8), (6, 4))
    before = str(gm.graph)
    assert WidenWeightGradients().apply(gm) == 0 and str(gm.graph) == before


@pytest.mark.parametrize(
    ("width", "classes", "options", "fires"),
    [  # Inductor pads large products of odd sizes if they have 16 bits
        *((64, classes, {}, fires) for classes, fires in ((50257, 0), (50264, 1), (129, 1))),
        *((8, 4, options, 0) for options in ({"device": "cpu"}, {"device": "xpu"}, {"dtype": HIGH})),
    ],
)
def test_sizes_devices_and_dtypes(width, classes, options, fires):
    gm = joint(FIRES["a linear layer's"][0], (6, width), (6, classes), **options)
    assert WidenWeightGradients().apply(gm) == fires


def test_inductor_knows_these_products():
    from torch._inductor.lowering import lowerings

    assert {aten.mm.dtype, aten.bmm.dtype} <= lowerings.keys()


@pytest.fixture
def as_on_cuda(monkeypatch) -> Iterator[None]:
    """The CPU multiplies into float32, too."""
    monkeypatch.setattr(dispatcher, "multiplies_into_float32", lambda device: True)
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in ("mm.dtype", "bmm.dtype"):
            library.impl(name, lambda a, b, out_dtype: torch.matmul(a.to(out_dtype), b.to(out_dtype)), "CPU")
        yield


def experts(m, x):
    h = m.last(torch.nn.functional.gelu(m.first(x))) + m.last(m.first(x))
    return torch.bmm(h.view(3, -1, 8), m.experts).float().square().mean()


@pytest.mark.parametrize("weights", ["cached", "every_call"])
def test_a_model_trains_on_them(as_on_cuda, weights):
    parts = {"first": nn.Linear(16, 24), "last": nn.Linear(24, 8, bias=False), "experts": weight(3, 8, 8)}
    model, totals = Net(experts, **parts), [0.0, 0.0]
    exact_model = copy.deepcopy(model).double()
    run, _ = amp(model, weights=weights)
    for _ in draws(model, exact_model):
        x = torch.randn(48, 16)
        exact = gradients(exact_model, lambda m, x=x: m(x.double()))
        reference = gradients(model, lambda m, x=x: torch.autocast("cpu", LOW)(m)(x))
        ours = gradients(model, lambda _, x=x: run(x))
        totals = [total + error(found, exact) for total, found in zip(totals, (ours, reference), strict=True)]
    assert totals[0] < totals[1]
    for name, grad in zip(dict(model.named_parameters()), ours, strict=True):
        if name != "first.bias":
            assert not torch.equal(grad, grad.to(LOW).float()), f"{name}: a rounded gradient has 16 bits' digits"
    (joint_graph,) = ampcompile.explain(model, weights=weights, products="torch")(x).graphs
    assert joint_graph.joint_code.count("mm.dtype(") == 5  # two uses of both layers, and the experts


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
def test_a_rounding_of_the_users_own_in_a_backward_stays(as_on_cuda):
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return torch.mm(x.bfloat16(), w.bfloat16())

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            rounded = torch.mm(grad, w.bfloat16().t()).float()
            return rounded.tanh(), torch.mm(x.bfloat16().t(), grad).float() * 2

    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    expected = torch.autograd.grad(Own.apply(x, w).float().sum(), (x, w))
    run, _ = amp(lambda x, w: Own.apply(x, w).float().sum())
    for ours, theirs in zip(torch.autograd.grad(run(x, w), (x, w)), expected, strict=True):
        assert torch.equal(ours, theirs)
