"""Backward keeps the narrow form of what was widened, and never asks a weight that may have been written for it."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompile.passes import pipeline
from ampcompile.passes.after.recompute_casts import RecomputeCasts
from ampcompile.passes.analysis.aliasing import base_of
from ampcompile.passes.analysis.op_traits import CONVERSIONS_AFTER, PRODUCTS_AFTER, has
from ampcompile.passes.analysis.readers import computed_from_gradients
from ampcompile.passes.base import run_passes
from tests.compiling import HALF, HIGH, LOW, amp, change_passes, gradients, same_bits
from tests.models import Net


def bytes_saved(model, x, **options):
    """Bytes that a call keeps for its backward besides weights and inputs, and the gradients that come of it."""
    torch._dynamo.reset()
    loss = amp(model, **options)[0](x).float().square().sum()
    held = {t.data_ptr() for t in (*model.parameters(), x)}
    kept, pending, seen = {}, [loss.grad_fn], set()
    while pending:
        function = pending.pop()
        if function is not None and function not in seen:
            seen.add(function)
            pending += [other for other, _ in function.next_functions]
            if "Compiled" in type(function).__name__:
                kept |= {t.data_ptr(): t.untyped_storage().nbytes() for t in function.saved_tensors if t is not None}
    found = gradients(model, lambda m: loss)
    return sum(size for pointer, size in kept.items() if pointer not in held), found


def layers():
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))


def losses():
    """A product whose result is read in float32 by a loss with a kernel of its own."""
    return Net(lambda m, x: F.mse_loss(m.last(x), x), last=torch.nn.Linear(16, 16))


SAVED = {  # the model, options, and the bytes that are kept less than torch would; rows of inputs are 4
    "a loss": (losses, {}, 2 * 4 * 16),
    "layers": (layers, {}, 0),
    "layers that cast in every call": (layers, {"weights": "every_call"}, 0),
}


@pytest.mark.parametrize("name", SAVED)
def test_less_is_kept_and_gradients_have_the_same_bits(name, monkeypatch):
    make, options, less = SAVED[name]
    model, x = make(), torch.randn(4, 16)
    after, ours = bytes_saved(model, x, **options)
    change_passes(monkeypatch, leave_out=RecomputeCasts())
    before, theirs = bytes_saved(model, x, **options)
    assert before - after == less
    assert same_bits(ours, theirs)


@pytest.mark.parametrize(
    "options", [{}, *(pytest.param({"products": how}, marks=pytest.mark.ci) for how in ("float32", "torch"))]
)
def test_a_late_backward_sees_the_weights_of_its_forward(options):
    """The optimizer leaves no trace on the weights that it writes. tests/behaviour/test_late_backward.py: of copies."""
    model, x = layers(), torch.randn(4, 16)
    run, _ = amp(model, weights="every_call", lower="inductor", **options)
    expected = gradients(model, lambda m: run(x).float().square().sum())
    late = run(x).float().square().sum()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=1.0, fused=True).step()
    assert same_bits(gradients(model, lambda m: late), expected)


def joint(f, x):
    """A graph with a value and its gradient, as torch spells it after differentiation."""

    def value_and_gradient(primals_1, tangents_1):
        y = f(primals_1)
        return y[0], torch.ops.aten.mul(tangents_1, y[1])

    return make_fx(value_and_gradient, tracing_mode="fake")(x, torch.randn(4, 4))


READ = {  # f gives a value and what backward reads, and whether that is a cast to do again
    "widened": (lambda x: (x.sin(), x.to(LOW).sin().to(HIGH)), True),
    "a view of what was widened": (lambda x: (x.sin(), x.to(LOW).sin().to(HIGH).t()), True),
    "narrowed": (lambda x: (x.sin(), x.sin().to(LOW)), False),
    "from one low type to the other": (lambda x: (x.sin(), x.to(LOW).sin().to(HALF)), False),
    "returned too": (lambda x: ((y := x.to(LOW).sin().to(HIGH)), y), False),
    "not read itself": (lambda x: ((y := x.to(LOW).sin().to(HIGH).exp()), y + 1), False),
}


def normed(x, centered=True):
    shifted = x - x.mean(1, keepdim=True) if centered else x
    return shifted * shifted.square().mean(1, keepdim=True).rsqrt()


NORMED = {  # f gives what is normed; then the tags of that, of what is shifted, and of the result
    "what a product gave": (lambda x: x @ x, True, [None, "PREFER_RECOMPUTE", "PREFER_RECOMPUTE"]),
    "what is computed of an input": (
        lambda x: x.sin().t(),
        True,
        ["MUST_SAVE", "PREFER_RECOMPUTE", "PREFER_RECOMPUTE"],
    ),
    "what was rounded": (lambda x: x.sin().to(LOW).to(HIGH), True, ["PREFER_RECOMPUTE"] * 3),
    "without a mean": (lambda x: x @ x, False, [None, "PREFER_RECOMPUTE"]),
    "an input": (lambda x: x.t(), True, [None] * 3),
}


@pytest.mark.parametrize("name", NORMED)
def test_tags_what_norms_make_of_what_is_kept_anyway(name):
    f, centered, tags = NORMED[name]
    gm = joint(lambda x: (x.cos(), normed(f(x), centered)), torch.randn(4, 4))
    tagged = RecomputeCasts().apply(gm)
    (result,) = (
        node for node in gm.graph.nodes if node.target is torch.ops.aten.mul.Tensor and "tangents" not in str(node.args)
    )
    steps = [result, result.args[0]] + ([result.args[0].args[0]] if centered else [])
    *steps, source = steps  # of which torch saves a view's base alone
    found = [node.meta.get("recompute") for node in (base_of(source), *reversed(steps))]
    assert [tag and tag.name for tag in found] == tags and tagged == ("PREFER_RECOMPUTE" in tags)
    if tags[0] == "PREFER_RECOMPUTE":
        assert source.args[0].meta["recompute"].name == "MUST_SAVE"


@pytest.mark.parametrize("name", READ)
def test_tags_what_backward_reads_widened(name):
    f, tagged = READ[name]
    gm = joint(f, torch.randn(4, 4))
    assert RecomputeCasts().apply(gm) == tagged
    assert RecomputeCasts().apply(gm) == 0


def test_a_graph_without_backward_has_none():
    assert RecomputeCasts().apply(make_fx(lambda x: x.to(LOW).to(HIGH))(torch.randn(3))) == 0


def biased(x, first, last, vector, shift):
    return (F.gelu((x @ first).float() + vector) + shift).to(LOW) @ last


def normalized(x, first, last, vector, shift):
    return F.layer_norm((x @ first).float(), (16,), vector, shift).to(LOW) @ last


def gated(x, first, last, vector, shift):
    return ((x @ first).float() * vector.sigmoid() + shift).relu().to(LOW) @ last


def backward_on_gpu(f):
    """The backward graph of a model that is lowered for a GPU, which need not be there."""

    def joint(*args):
        *primals, tangent = args
        result = f(*primals)
        return result.detach(), *torch.autograd.grad(result, primals, tangent)

    dtypes = [LOW] * 3 + [HIGH] * 2 + [LOW]
    shapes = [(64, 16), (16, 16), (16, 16), (16,), (16,), (64, 16)]
    primals = [torch.randn(shape).to(dtype).requires_grad_() for shape, dtype in zip(shapes, dtypes, strict=True)]
    gm = make_fx(joint, select_decomp_table(), tracing_mode="fake")(*primals)
    with FakeTensorMode():
        fakes = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in zip(shapes, dtypes, strict=True)]
        gm = make_fx(gm)(*fakes)
    for count, node in enumerate(gm.graph.find_nodes(op="placeholder"), 1):
        node.target = node.name = f"primals_{count}" if count < len(shapes) else "tangents_1"
    run_passes(pipeline.after(), gm)
    gm.recompile()
    return min_cut_rematerialization_partition(gm, fakes, num_fwd_outputs=1)[1]


@pytest.mark.parametrize("f", [biased, normalized, gated])
def test_on_a_gpu_what_products_of_backward_read_is_saved(f):
    """Nothing but its dtype and its view is computed again."""
    graph = backward_on_gpu(f)
    products = [node for node in graph.graph.nodes if has(node.target, PRODUCTS_AFTER)]
    of_gradients = computed_from_gradients(graph)
    operands = {base_of(each) for node in products for each in node.all_input_nodes} - of_gradients
    assert len(products) == 4 and len(operands) == 4
    for operand in operands:
        while operand.op != "placeholder":
            assert has(operand.target, CONVERSIONS_AFTER), operand.format_node()
            operand = base_of(operand.args[0])
