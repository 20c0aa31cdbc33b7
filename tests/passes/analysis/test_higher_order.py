"""Bodies of higher-order ops are rewritten where they are called; results and gradients are eager autocast's."""

import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.amp import custom_bwd, custom_fwd
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ampcompile.passes.analysis.higher_order import HOPS
from tests.compiling import HIGH, LOW, amp, eager, same_bits
from tests.models import Net, weight
from tests.passes.together import errors, less_exact
from tests.rules.test_autocast_lists import cuda_said_to_be_there

# Dynamo makes an object of a custom function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # torch's, where a body takes a tuple
]


def layers(run, **parts):
    return Net(run, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), **parts)


def inside(m, x):
    return m.layers[1](F.gelu(m.layers[0](x)))


def checkpointed(m, x):
    """Checkpoints in checkpoints, a layer used twice."""

    def outer(x):
        return x + checkpoint(lambda x: inside(m, x), F.layer_norm(x, (8,)), use_reentrant=False)

    return m.layers[2](checkpoint(outer, x, use_reentrant=False)) + m.layers[1](x)


def saves_products(ctx, op, *args, **kwargs):
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


contexts = functools.partial(create_selective_checkpoint_contexts, saves_products)


def selective(m, x):
    return m.layers[2](checkpoint(lambda x: inside(m, x), x, use_reentrant=False, context_fn=contexts))


class Product(torch.autograd.Function):
    """Two inputs and a constant, two outputs, saved tensors; its backward is as exact as what it saved."""

    @staticmethod
    def forward(ctx, a, b, scale):
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return a @ b * scale, a.sum()

    @staticmethod
    def backward(ctx, product, total):
        a, b = ctx.saved_tensors
        product = product.to(b.dtype)
        return (product @ b.t() * ctx.scale).to(a.dtype) + total, (a.to(b.dtype).t() @ product) * ctx.scale, None


class Sized(torch.autograd.Function):
    """Keeps its input's sizes, numbers, for backward."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.sizes = a.shape
        return (a @ b).sum(0)

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(ctx.sizes).contiguous(), torch.outer(grad, grad).float()


def product_under(**cast):
    class Under(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu", **cast)
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx, product):
            a, b = ctx.saved_tensors
            return product @ b.t(), a.t() @ product

    return Under


def custom(function, *constants):
    def run(m, x):
        y = function.apply(m.layers[0](x), m.weight, *constants)
        return m.layers[1](y[0] + y[1] if isinstance(y, tuple) else y)

    return layers(run, weight=weight(8, 8))


def cond(m, x):
    h = m.layers[0](x)
    return torch.cond(x.sum() > 0, lambda h: m.layers[1](h), lambda h: h.sin(), (h,))


def loop(m, x):
    step = lambda i, h, c: (i + 1, m.layers[1](h).to(h.dtype), m.layers[2](c) + c)
    start = (torch.tensor(0), m.layers[0](x), x)
    return sum(torch._higher_order_ops.while_loop(lambda i, h, c: i < 3, step, start)[1:])


@torch.compiler.nested_compile_region
def region(layer, x):
    return F.gelu(layer(x))


def nested(m, x):
    """One region for operands of two dtypes, with autocast on and off."""
    h = region(m.layers[1], region(m.layers[0], x))
    with torch.autocast("cpu", enabled=False):
        off = region(m.layers[2], x)
    return region(m.layers[2], h.to(x.dtype)) + region(m.layers[2], h) + off


def items(m, x):
    n = (x.abs().sum() > 0).sum().item()
    rows = (x[:, 0] > 0).nonzero()[:, 0]
    return m.layers[0](x).sum() * n + torch.ones(n + 2).sum() + m.layers[1](m.layers[0](x)[rows]).sum()


MODELS = {
    "checkpoint": lambda: layers(checkpointed),
    "selective checkpoint": lambda: layers(selective),
    "custom function": lambda: custom(Product, 3),
    "custom function, float32": lambda: custom(product_under(cast_inputs=HIGH)),
    "custom function, as it is": lambda: custom(product_under()),
    "custom function, sizes": lambda: custom(Sized),
    "cond": lambda: layers(cond),
    "while loop": lambda: layers(loop),
    "nested region": lambda: layers(nested),
    "items": lambda: layers(items),
}


@pytest.fixture(autouse=True)
def sizes_that_depend_on_data():
    config = torch._dynamo.config
    with config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


# In the nested region Dynamo raises a KeyError for such sizes, and torch can't differentiate it by itself.
SOME = ["checkpoint", "custom function, sizes", "cond", "items", "while loop"]
LOWERED = ["selective checkpoint", "cond", "nested region"]


@pytest.mark.parametrize(
    ("lower", "names"),
    [
        ("aot_eager", [*MODELS]),
        pytest.param("eager", SOME, marks=pytest.mark.ci),
        pytest.param("inductor", LOWERED, marks=pytest.mark.ci),
        pytest.param("inductor", ["custom function", "items"], marks=pytest.mark.slow),
    ],
)
def test_gradients_are_as_exact_as_eager_autocasts(lower, names):
    sums, recorder = errors({name: MODELS[name]() for name in names}, lower=lower)
    assert less_exact(sums) == []
    assert recorder.compared > 5 * len(names) and not recorder.disagreements


@pytest.mark.ci
def test_one_graph_serves_inputs_of_all_sizes():
    sums, recorder = errors({name: MODELS[name]() for name in SOME}, batches=(4, 5, 7, 4, 5, 7, 4, 5), dynamic=True)
    assert less_exact(sums) == []
    assert len(recorder.graphs) == 1


def test_a_shared_body_decided_for_other_dtypes_is_copied_and_the_first_kept():
    model, x = layers(None), torch.randn(4, 8)

    def f(x):
        return region(model.layers[0], x + 1), region(model.layers[0], x * 2), region(model.layers[0], x - 3)

    run, recorder = amp(f, policy="op add.Tensor=low")
    results = run(x)
    calls = recorder.graphs[0].graph.graph.find_nodes(op="call_function", target=HOPS.invoke_subgraph)
    names = [call.args[1] for call in calls]
    assert len(names) == 3 and names[1] == names[2] != names[0]  # torch's caches know a body by this name
    for result, y in zip(results, (x.to(LOW) + 1, x * 2, x - 3), strict=True):
        assert torch.equal(result, eager(lambda y: region(model.layers[0], y), y))


def test_branches_that_would_differ_give_the_widest_and_a_loop_keeps_its_carry():
    model, x = layers(cond), torch.randn(4, 8)
    run, _ = amp(model, policy="op sin=fp32")
    assert run(x).dtype == HIGH
    torch._dynamo.reset()
    run, _ = amp(layers(loop), policy="op add.Tensor=low")
    assert torch.isfinite(run(x)).all()


def test_flex_attention_runs_low_and_its_score_function_as_written():
    from torch.nn.attention.flex_attention import flex_attention

    bias = torch.randn(128, 128)

    def f(q, k, v):
        return flex_attention(q, k, v.float(), score_mod=lambda score, b, h, i, j: score + bias[i, j] * 0.1)

    q, k, v = (torch.randn(1, 1, 128, 16) for _ in range(3))
    with torch.no_grad():
        expected = eager(torch.compile(f, backend="aot_eager"), q, k.to(LOW), v)
        torch._dynamo.reset()
        run, recorder = amp(f)
        result = run(q, k.to(LOW), v)
    assert same_bits(result, expected) and result.dtype == LOW
    assert not recorder.disagreements
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask=bias * 0.1)
    assert torch.allclose(result.float(), exact, atol=0.05)


def test_a_triton_kernel_is_called_with_what_arrives():
    triton = pytest.importorskip("triton")
    from tests.passes.triton_add import add

    def f(x, w):
        h = x @ w
        out = torch.empty_like(h)
        add[(1,)](h, x, out, h.numel(), BLOCK=64)
        return torch.softmax(out, -1) @ w

    there = lambda *args, **kwargs: True
    patches = mock.patch.multiple("torch.utils._triton", has_triton=there, has_triton_package=there)
    on_fakes = mock.patch(
        "ampcompile.torch_private.dynamo.cannot_compile", lambda: False
    )  # the graph is only looked at
    with FakeTensorMode(), cuda_said_to_be_there(), patches, on_fakes:
        x, w = torch.randn(8, 8, device="cuda"), torch.randn(8, 8, device="cuda")
        run, recorder = amp(f, lower="eager", dtype=LOW)
        assert run(x, w).dtype == LOW
    assert not recorder.disagreements
    (call,) = recorder.graphs[0].graph.graph.find_nodes(op="call_function", target=HOPS.triton_kernel_wrapper_mutation)
    assert [call.kwargs["kwargs"][name].meta["val"].dtype for name in "xyo"] == [LOW, HIGH, LOW]
    assert triton


def test_what_a_checkpoint_recomputes_is_not_saved():
    model, x = layers(inside), torch.randn(64, 8)
    saved = {}
    for name, f in {"all": model, "less": lambda x: checkpoint(model, x, use_reentrant=False)}.items():
        torch._dynamo.reset()
        run, recorder = amp(f)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            run(x)
        saved[name] = sum(size for size in sizes if size >= x.numel())
        calls = recorder.graphs[0].graph.graph.find_nodes(op="call_function", target=HOPS.tag_activation_checkpoint)
        assert len(calls) == (name == "less")
    assert saved["less"] <= saved["all"] - 2 * x.numel()
