"""Graphs that other engines' mixed-precision passes are tested on, in our terms: which op runs where, how many casts.

Left out: retargeting a user's cast, one type for a container or a loop's carry chosen by its readers, and deleting
round trips that lose digits by default, because eager autocast does none of them and results would differ from it.
"""

import pytest
import torch
import torch.nn.functional as F

import ampcompile
from tests.compiling import HALF, HIGH, LOW, amp, dtypes, eager, same_bits

X, W, V = (torch.empty(8, 8) for _ in range(3))
IMAGE, KERNEL, KERNEL2, BIAS = torch.empty(1, 3, 8, 8), torch.empty(3, 3, 3, 3), torch.empty(3, 3, 3, 3), torch.ones(3)


@pytest.fixture(autouse=True)
def drawn() -> None:
    """Numbers of the test's own seed."""
    for value in (X, W, V, IMAGE, KERNEL, KERNEL2):
        value.normal_()


def report(f, *args, **options):
    """What `explain` tells; results stay in eager autocast's dtypes, so all casts are those of the case."""
    torch._dynamo.reset()
    return ampcompile.explain(f, **{"lower": "aot_eager", "outputs": "autocast", **options})(*args)


def left(found):
    """The casts of ours that the forward graph still does."""
    return [c for graph in found.graphs for c in graph.casts if not {"hoisted", "shared", "folded"} & set(c.fate)]


def forward_bytes(found):
    return next(t.bytes for t in reversed(found.graphs[0].totals) if t.stage == "share_casts")


def chain(x, w):
    y = x.exp().relu().sqrt().relu()
    return F.softmax(F.mse_loss(torch.mm(y, w).relu(), torch.zeros(8, 8), reduction="none").relu(), -1)


UNCHANGED = {  # case: function and inputs; no cast at all
    "no op for low precision": (lambda x: x.exp().relu().sqrt().relu(), X),
    "in low precision by hand": (lambda x: torch.mm(x.to(LOW), x.to(LOW)).relu().float().relu(), X),
    "already low": (lambda x: torch.mm(x, x).relu(), X.to(LOW)),
    "sum, mean, pooling, softmax alone": (
        lambda x: (x.sum(), x.mean(), F.adaptive_avg_pool2d(x[None], 1), x.softmax(-1), torch.arange(5.0)),
        X,
    ),
    "an empty region": (lambda x: _empty_region(x), X),
}


def _empty_region(x):
    with torch.autocast("cpu", LOW):
        pass
    return x.sin()


@pytest.mark.parametrize("name", UNCHANGED)
def test_unchanged(name):
    f, x = UNCHANGED[name]
    assert report(f, x).casts == []
    torch._dynamo.reset()
    assert same_bits(amp(f)[0](x), eager(f, x))


CAST_BYTES = {  # case: function, inputs, and elements that the expected graph casts, 6 bytes each
    "one stretch in low precision": (chain, (X, W), 64 + 64 + 64),  # x, w, the way back up
    "two convolutions with relu between": (
        lambda x, w, v: F.conv2d(F.relu(F.conv2d(x, w)), v),
        (IMAGE, KERNEL, KERNEL2),
        192 + 81 + 81,
    ),
    "a product, a float32 weight added, silu": (lambda x, w, v: F.silu(torch.mm(x, w) + v), (X, W, V), 64 + 64),
    "one input for a convolution and for softmax": (
        lambda x, w: F.conv2d(x, w, padding=1) + x.softmax(-1),
        (IMAGE, KERNEL),
        192 + 81,
    ),
    "cat before a product": (lambda a, b, w: torch.cat([a, b]) @ w, (X, V, W), 128 + 64),
    "a bias in range": (lambda x, w, b: F.conv2d(x, w, b), (IMAGE, KERNEL, BIAS), 192 + 81 + 3),
    "a linear layer and a mean": (lambda x, w, b: F.linear(x, w, b).mean(), (X, W, torch.ones(8)), 64 + 64 + 8),
    "added, returned and multiplied": (lambda x, w: (y := x + w, torch.mm(y, w)), (X, W), 64 + 64),
}


@pytest.mark.parametrize("name", CAST_BYTES)
def test_no_more_bytes_are_cast_than_expected(name):
    f, args, elements = CAST_BYTES[name]
    with torch.no_grad():
        assert forward_bytes(report(f, *args)) <= 6 * elements
        torch._dynamo.reset()
        found, expected = amp(f)[0](*args), eager(f, *args)
    assert dtypes(found) == dtypes(expected) and same_bits(found, expected)


def test_a_bias_out_of_range_is_added_in_float32():
    bias = torch.tensor([70000.0, 0, 0])

    def f(x, w):
        return F.conv2d(x, w) + torch.tensor([70000.0, 0, 0]).reshape(1, 3, 1, 1)

    result = amp(f, dtype=HALF)[0](IMAGE, KERNEL)
    expected = F.conv2d(IMAGE, KERNEL, bias)
    assert result.dtype == HIGH and torch.allclose(result, expected, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize(("dtype", "clamped_in"), [(HALF, HIGH), (LOW, LOW)])
def test_a_clamp_past_the_range_of_float16(dtype, clamped_in):
    result = amp(lambda x: (torch.mm(x, x) / 5).clamp(-128000, 128000), dtype=dtype)[0](X)
    assert result.dtype == clamped_in and result.isfinite().all()


def test_a_region_switched_off_inside_and_its_gradients():
    w = W.clone().requires_grad_()

    def f(x, w):
        y = torch.mm(x, w)
        with torch.autocast("cpu", enabled=False):
            y = torch.mm(y.float(), w)
        return torch.mm(y, w)

    results = []
    for run in (amp(f)[0], lambda x, w: eager(f, x, w)):
        w.grad = None
        out = run(X, w)
        out.float().sum().backward()
        results.append([out.detach(), w.grad])
    assert same_bits(*results)


@pytest.mark.parametrize("dynamic", [True, False, None])
def test_a_region_across_a_graph_break(dynamic):
    def f(x, w):
        with torch.autocast("cpu", LOW):
            y = torch.mm(x, w)
            torch._dynamo.graph_break()
            return torch.mm(y, w).relu()

    options = {"lower": "aot_eager", "outputs": "autocast"}
    run = torch.compile(f, backend="amp", dynamic=dynamic, options=options)
    assert same_bits(run(X, W), eager(f, X, W))


MATMUL_ADD = [
    lambda a, b, c: torch.mm(a, b).float().to(LOW) + c.to(LOW),
    lambda a, b, c: torch.mm(a, b).float().t().to(LOW) + c.t().to(LOW),
    lambda a, b, c: torch.mm(torch.mm(a, b).float().t(), c),
    lambda a, b, c: torch.mm(a.to(LOW).float(), b.to(LOW).float()) + c,
    lambda a, b, c: torch.mm(a.t().to(LOW).float(), b) + c.to(LOW).float(),
]


@pytest.mark.parametrize("f", MATMUL_ADD)
def test_no_round_trip_of_ours_is_left_and_every_bit_is_eagers(f):
    found = report(f, X, W, V)
    low = [c for c in left(found) if c.of == "activation" and c.dtype_to == LOW]
    assert not low, "what was widened from low precision is read where it was low"
    torch._dynamo.reset()
    assert same_bits(amp(f)[0](X, W, V), eager(f, X, W, V))


def test_a_rounding_that_the_user_wrote_stays():
    f = lambda x, w, b: (x @ w).to(HALF).to(LOW) + b  # noqa: E731
    torch._dynamo.reset()
    assert same_bits(amp(f)[0](X, W, V), eager(f, X, W, V))


def test_reduce_max_before_a_product_and_zero_elements():
    f = lambda x, w: torch.mm(x.amax(0, keepdim=True).expand(8, 8), w)  # noqa: E731
    assert same_bits(amp(f)[0](X, W), eager(f, X, W))
    torch._dynamo.reset()
    empty = torch.randn(0, 8)
    assert same_bits(amp(torch.mm)[0](empty, W), eager(torch.mm, empty, W))
