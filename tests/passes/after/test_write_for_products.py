"""After differentiation, on a GPU, operands of products and sums are written in the shape that they are computed in."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ampcompile.passes.after import write_for_products
from ampcompile.passes.after.write_for_products import ROWS, WriteForProducts
from tests.compiling import HIGH, LOW, compile_anew, training_errors
from tests.models import Attention, Block, Net
from tests.passes.tidied import tidied_joint, words

aten = torch.ops.aten


def operands():
    """x of 4 x 6 x 8 and an image of 2 x 3 x 10 x 10 in float32, a matrix of 8 x 8 and a kernel in 16 bits."""
    return torch.randn(4, 6, 8), torch.randn(8, 8).to(LOW), torch.randn(2, 3, 10, 10), torch.randn(5, 3, 3, 3).to(LOW)


def rows():
    """Two times 8 x 64 rows of 16 numbers, and a matrix in 16 bits."""
    return torch.randn(8, 64, 16), torch.randn(8, 64, 16), torch.randn(16, 16).to(LOW)


def written(f, args, device="cuda", close=()):
    """The graph after the pass, and how many operands it writes; of results in `close` the last digit may differ."""
    return tidied_joint(f, WriteForProducts(), *args, device=device, close=close)


def rounded(x):
    return torch.ops.prims.convert_element_type(x, LOW)


def convolved(x, kernel):
    return aten.convolution(x, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


WRITTEN = {  # and how many operands are
    "a view of what is rounded": (1, lambda x, w, i, k: aten.mm(rounded(x.sin()).view(24, 8), w)),
    "what is rounded of a view": (1, lambda x, w, i, k: aten.mm(rounded(x.sin().view(24, 8)), w)),
    "views of a view, transposed": (1, lambda x, w, i, k: aten.mm(w, rounded(x.sin()).view(96, 2).view(24, 8).t())),
    "read in float32 as well": (1, lambda x, w, i, k: (aten.mm(rounded(y := x.sin()).view(24, 8), w), y.cos())),
    "two products": (1, lambda x, w, i, k: (aten.mm(y := rounded(x.sin()).view(24, 8), w), aten.mm(y.t(), y))),
    "a convolution": (1, lambda x, w, i, k: convolved(rounded(i.view(2, 1, 3, 100).sin().view(2, 3, 10, 10)), k)),
    "few rows, added up": (1, lambda x, w, i, k: (aten.mm(y := rounded(x.sin()).view(24, 8), w), y.sum([0], True))),
}
LEFT = {
    "no view": lambda x, w, i, k: aten.mm(rounded(x.view(24, 8).sin()), w),
    "an input": lambda x, w, i, k: aten.mm(rounded(x).view(24, 8), w),
    "what a product gave": lambda x, w, i, k: aten.mm(rounded(aten.mm(v := w.to(HIGH), v).view(4, 16)).view(8, 8), w),
    "read by what computes": lambda x, w, i, k: (aten.mm(y := rounded(x.sin()).view(24, 8), w), y.exp()),
    "returned": lambda x, w, i, k: (aten.mm(y := rounded(x.sin()).view(24, 8), w), y),
    "in float32": lambda x, w, i, k: aten.mm(x.sin().view(24, 8), w.to(HIGH)),
    "numbers that lie apart": lambda x, w, i, k: aten.mm(rounded(x.mT.sin().mT).reshape(24, 8), w),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_operands_are_rounded_in_the_shape_they_are_computed_in(name):
    count, f = WRITTEN[name]
    gm, times = written(f, operands())
    ops = words(gm).split()
    assert times == count == words(gm).count("sin < as_strided") == ops.count("<")


def test_declines_on_the_cpu():
    assert written(WRITTEN["a view of what is rounded"][1], operands(), "cpu")[1] == 0


def test_declines_where_sizes_are_not_known():
    mode, source = FakeTensorMode(shape_env=ShapeEnv()), ConstantSource("rows")
    symbol = mode.shape_env.create_symbol(4, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    with mode:
        x = torch.empty(mode.shape_env.create_symintnode(symbol, hint=4, source=source), 6, 8, device="cuda")
        w = torch.empty(8, 8, device="cuda", dtype=LOW)
    gm = make_fx(lambda x, w: aten.mm(rounded(x.sin()).view(-1, 8), w), tracing_mode="symbolic")(x, w)
    assert WriteForProducts().apply(gm) == 0


def joined(x, grad, w):
    """The gradients of a linear layer whose results were three, as those of attention."""
    three = torch.stack([rounded(x), rounded(grad), rounded(x.sin())])
    low = three.permute(1, 2, 0, 3).clone(memory_format=torch.contiguous_format).view(8 * 64, 48)
    return aten.mm(low, low.t()), low.sum([0], True)


def biased(x, grad, w):
    """The gradients of a linear layer's operand and bias, behind an activation; 8 x 64 rows."""
    low = rounded(grad * x.cos()).view(8 * 64, 16)
    return aten.mm(low, w), low.sum([0], True), rounded(grad).exp()


def normed(x, grad, w):
    """The same where sums of rows are computed before."""
    low = rounded(grad - x * (grad * x).sum([2], True)).view(8 * 64, 16)
    return aten.mm(low, w), low.sum([0], True), rounded(grad).exp()


SUMMED = {  # gradients, and whether the sum for the bias is taken in chunks of rows, then of those
    "of attention": (joined, True),
    "of an activation": (biased, True),
    "of a norm, whose kernel sums rows": (normed, False),
}


@pytest.mark.parametrize("name", SUMMED)
def test_columns_are_added_up_where_they_are_computed_unless_rows_are_too(name):
    f, in_chunks = SUMMED[name]
    x, grad, w = rows()
    if f is joined:
        x[0, 0, :3] = torch.tensor([float("nan"), -0.0, float("inf")])  # which are easily lost
    gm, times = written(f, (x, grad, w), close=(1,))
    sums = [
        node for node in gm.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList) if node.args[1] != [2]
    ]
    assert times == 1 and [node.args[1] for node in sums] == ([[1], [0]] if in_chunks else [[0]])
    if in_chunks:
        assert sums[0].args[0].meta["val"].shape[:2] == (8 * 64 // ROWS, ROWS)


def residual(stored, normed):
    """The sum of a residual's gradient and a norm's, which takes sums of groups of 256 numbers."""

    def f(x, grad, w):
        groups = x.view(8, 4, 256)
        of_norm = groups - groups.sum([2], True)
        return (aten.add.Tensor(stored(grad, w), normed(of_norm)).exp(),)

    return f


def multiplied(grad, w):
    return aten.mm(rounded(grad).view(512, 16), w).view(8, 64, 16)


ADDED = {
    "rounded, then seen as the residual": residual(multiplied, lambda y: rounded(y).view(8, 64, 16)),
    "rounded of a view": residual(multiplied, lambda y: rounded(y.view(8, 64, 16))),
    "in float32": residual(lambda grad, w: multiplied(grad, w).to(HIGH), lambda y: y.view(8, 64, 16)),
    "rounded, to what is wider": residual(lambda grad, w: grad, lambda y: rounded(y.view(8, 64, 16))),
    "to an input": residual(lambda grad, w: grad, lambda y: y.view(8, 64, 16)),
}
ADDED_APART = {
    "to what is computed": residual(lambda grad, w: grad.cos(), lambda y: y.view(8, 64, 16)),
    "where nothing is summed": lambda x, grad, w: grad + x.view(8, 4, 256).sin().view(8, 64, 16),
    "in one shape": lambda x, grad, w: grad + (x - x.sum([2], True)),
    "to a weight that is repeated": residual(lambda grad, w: w.to(HIGH), lambda y: y.view(32, 16, 16)),
    "a residual's numbers that lie apart": residual(lambda grad, w: grad, lambda y: y.view(8, 16, 64).mT),
}


@pytest.mark.parametrize("name", ADDED)
def test_a_residual_is_added_where_a_norm_is_computed(name):
    gm, times = written(ADDED[name], rows())
    (total,) = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    (stored,) = gm.graph.find_nodes(op="call_function", target=aten.as_strided.default)
    assert times == 1 and total.meta["val"].shape == (8, 4, 256)
    assert [*stored.args] == [total, [8, 64, 16], [1024, 16, 1]]


@pytest.mark.parametrize("name", [*LEFT, *ADDED_APART])
def test_declines(name):
    f, args = (LEFT[name], operands()) if name in LEFT else (ADDED_APART[name], rows())
    assert written(f, args)[1] == 0


def block():
    """A block of a transformer whose layers have biases."""
    attend = nn.Sequential(nn.LayerNorm(16), Attention(causal=False))
    return nn.Sequential(Net(lambda m, x: x + m.attend(x), attend=attend), Block(16, activation=F.gelu))


def residual_block(m, x):
    """Of a UNet."""
    x = m.stem(x)
    x = x + m.conv(F.silu(m.norm(x)))
    return x + m.conv(F.silu(m.norm(x)))


def of_a_unet():
    stem, conv = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    return Net(residual_block, norm=nn.GroupNorm(2, 8), stem=stem, conv=conv)


@pytest.mark.ci
@pytest.mark.parametrize(("model", "shape", "least"), [(block, (4, 64, 16), 3), (of_a_unet, (2, 3, 16, 16), 1)])
def test_a_block_trains_through_inductor_as_on_a_gpu(monkeypatch, model, shape, least):
    monkeypatch.setattr(write_for_products, "DEVICE", "cpu")
    compile_anew(monkeypatch)  # what was compiled for a CPU isn't wanted
    found, apply = [], WriteForProducts.apply
    monkeypatch.setattr(WriteForProducts, "apply", lambda self, gm: found.append(apply(self, gm)) or found[-1])
    options = {"lower": "inductor", "products": "torch"}  # small products would be float32's
    eager, ours, _ = training_errors(model(), lambda m, x: m(x).square().mean(), (torch.randn(shape),), **options)
    assert max(found) >= least and ours <= 1.05 * eager
