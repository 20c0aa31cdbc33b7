"""Gradients of weights leave their product as float32: which products, on which devices, with which numbers."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import ampcompile
from ampcompile.passes.after.widen_weight_gradients import WidenWeightGradients
from ampcompile.torch_private import dispatcher
from tests.compiling import amp, draws, error, gradients
from tests.models import Net, weight

aten = torch.ops.aten
LOW = torch.bfloat16


def joint(f, *shapes, device="cuda", dtype=LOW) -> GraphModule:
    """The graph of `f(*primals, tangents)` on a device that need not be there; the last shape is the tangents'."""

    def named(*args):
        return f(*args)

    with FakeTensorMode():
        gm = make_fx(named)(*(torch.empty(shape, device=device, dtype=dtype) for shape in shapes))
    last = list(gm.graph.find_nodes(op="placeholder"))[-1]
    last.target = last.name = "tangents_1"
    return gm


def counted(gm: GraphModule, *ops) -> list[int]:
    gm.graph.lint()
    return [len(gm.graph.find_nodes(op="call_function", target=op)) for op in ops]


FIRES = {
    "a linear layer's": lambda x, t: torch.mm(t.t(), x).t().t().float(),
    "times a view": lambda x, t: torch.mm(t.t(), x).view(-1, 4).float(),
    "behind the cast": lambda x, t: torch.mm(t.t(), x).float().t(),
    "a sum's terms": lambda x, t: torch.mm(t.t(), x).float() + torch.mm(t.t(), x * 2).t().t().float(),
    "a batch": lambda x, t: torch.bmm(t.t().unsqueeze(0), x.unsqueeze(0)).float(),
}


@pytest.mark.parametrize("dtype", [LOW, torch.float16])
@pytest.mark.parametrize("name", FIRES)
def test_fires_on_what_is_only_returned(name, dtype):
    gm = joint(FIRES[name], (6, 8), (6, 4), dtype=dtype)
    returned = [node.meta["val"] for node in gm.graph.output_node().all_input_nodes]
    before = counted(gm, aten.mm.default, aten.bmm.default)
    assert WidenWeightGradients().apply(gm) == sum(before) > 0
    assert counted(gm, aten.mm.dtype, aten.bmm.dtype) == before
    assert counted(gm, aten.mm.default, aten.bmm.default, aten._to_copy.default) == [0, 0, 0]
    after = [node.meta["val"] for node in gm.graph.output_node().all_input_nodes]
    for old, new in zip(returned, after, strict=True):
        assert (new.dtype, new.shape, new.stride(), new.device) == (torch.float32, old.shape, old.stride(), old.device)
    for node in gm.graph.nodes:
        if node.target in (aten.mm.dtype, aten.t.default, aten.view.default) and node.meta["val"].dim():
            assert node.target(*torch.fx.map_arg(node.args, lambda n: n.meta["val"])).dtype == node.meta["val"].dtype
    assert WidenWeightGradients().apply(gm) == 0


DECLINES = {
    "forward's": lambda x, y, t: (torch.mm(x.t(), y).float(), t * 2),
    "used in the middle": lambda x, y, t: torch.mm(t.t(), x).float().exp(),
    "used in 16 bits as well": lambda x, y, t: (lambda g: (g.float(), g * 2))(torch.mm(t.t(), x)),
    "scaled in 16 bits": lambda x, y, t: (torch.mm(t.t(), x) * 0.3).float(),
    "returned in 16 bits": lambda x, y, t: torch.mm(t.t(), x),
    "to float64": lambda x, y, t: torch.mm(t.t(), x).double(),
    "to the host": lambda x, y, t: torch.mm(t.t(), x).to("cpu", torch.float32),
    "summed in 16 bits": lambda x, y, t: (torch.mm(t.t(), x) + torch.mm(t.t(), y)).float(),
    "added to": lambda x, y, t: torch.addmm(x.narrow(0, 0, 4), t.t(), y).float(),
    "repeated": lambda x, y, t: torch.mm(t.t(), x).expand(2, 4, 8).float(),
}


@pytest.mark.parametrize("name", DECLINES)
def test_declines(name):
    gm = joint(DECLINES[name], (6, 8), (6, 8), (6, 4))
    before = str(gm.graph)
    assert WidenWeightGradients().apply(gm) == 0 and str(gm.graph) == before


@pytest.mark.parametrize(("classes", "fires"), [(50257, 0), (50264, 1), (129, 1)])
def test_what_inductor_pads_stays_in_16_bits(classes, fires):
    assert WidenWeightGradients().apply(joint(FIRES["a linear layer's"], (6, 64), (6, classes))) == fires


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"device": "xpu"}, {"dtype": torch.float32}])
def test_declines_on_other_devices_and_dtypes(options):
    assert WidenWeightGradients().apply(joint(FIRES["a linear layer's"], (6, 8), (6, 4), **options)) == 0


def test_inductor_knows_these_products():
    from torch._inductor.lowering import lowerings

    assert {aten.mm.dtype, aten.bmm.dtype} <= lowerings.keys()


@pytest.fixture
def as_on_cuda(monkeypatch) -> Iterator[None]:
    """The CPU multiplies into float32, too."""
    monkeypatch.setattr(dispatcher, "multiplies_into_float32", lambda device: True)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("mm.dtype", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype), "CPU")
        library.impl("bmm.dtype", lambda a, b, out_dtype: torch.matmul(a.to(out_dtype), b.to(out_dtype)), "CPU")
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
