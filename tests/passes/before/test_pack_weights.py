"""Linear layers and convolutions on the CPU read packed copies, where that changes no bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcompile.kernels.packed_conv import PACKED_CONV, ConvBlocks
from ampcompile.kernels.packed_linear import PACKED_LINEAR, LinearBlocks, available
from ampcompile.passes.before.pack_weights import GELU, PackWeights
from ampcompile.passes.graph import module_path, notes_of
from ampcompile.passes.weight_copy import WEIGHT_COPY
from ampcompile.weights.binding import PAYS
from tests.compiling import same_bits
from tests.models import Net, weight
from tests.passes.rewriting import count, rewritten

pytestmark = pytest.mark.skipif(not available(torch.bfloat16), reason="this CPU's oneDNN has no bfloat16 products")


def layers(inner: int = 64, outer: int = 80) -> nn.Module:
    a, b = nn.Linear(inner, outer), nn.Linear(outer, inner, bias=False)
    return Net(lambda m, x: m.b(torch.relu(m.a(m.b(m.a(x))))), a=a, b=b)


def packed(module: nn.Module, *args: Tensor, **options: Any) -> tuple[int, list[Any]]:
    """How many layers read packed weights, and what the copies are packed for. Small products aren't left out."""
    (graph,) = rewritten(module, *args, **{"lower": "inductor", "products": "torch"} | options)
    inputs = graph.graph.graph.find_nodes(op="placeholder")
    specs = [spec for node in inputs if (spec := notes_of(node).copy)]
    return count(graph, PACKED_LINEAR) + count(graph, PACKED_CONV), [spec.blocks for spec in specs]


def test_fires_where_no_gradient_is_wanted() -> None:
    # Two uses of a weight share its packed form; a bias stays strided.
    with torch.no_grad():
        assert packed(layers(), torch.randn(3, 64)) == (4, [None, LinearBlocks(), LinearBlocks()])
        assert packed(biased(slice(64, None)), torch.randn(3, 64))[0] == 1  # a part of a vector
        (graph,) = rewritten(layers(), torch.randn(3, 64), lower="inductor", products="torch")
    assert PackWeights(frozenset({torch.bfloat16})).apply(graph.graph) == 0, "idempotent"
    assert count(graph, WEIGHT_COPY) == 2
    assert packed(layers(), torch.randn(3, 64)) == (0, [None] * 3)


def test_nothing_is_packed_for_a_onednn_that_is_turned_off() -> None:
    torch._C._set_mkldnn_enabled(False)  # torch.backends' own setters refuse once torch's test tools are loaded
    try:
        with torch.no_grad():
            assert packed(layers(), torch.randn(3, 64))[0] == 0
            assert packed(nn.Conv2d(4, 8, 3), torch.randn(2, 4, 9, 9))[0] == 0
    finally:
        torch._C._set_mkldnn_enabled(True)


@pytest.mark.parametrize(("rows", "number"), [(3, 0), (1000, 4)])
def test_small_products_that_run_in_float32_read_plain_copies(rows: int, number: int) -> None:
    with torch.no_grad():
        assert packed(layers(), torch.randn(rows, 64), products="auto")[0] == number
        assert packed(nn.Conv2d(4, 8, 3), torch.randn(rows // 20 + 1, 4, 9, 9), products="auto")[0] == number // 4


@pytest.mark.cpu(mkl=True)
@pytest.mark.parametrize(
    ("rows", "width", "options", "number"),
    [
        (64, 128, {"products": "float32"}, 0),
        (64, 640, {"products": "float32"}, 4),  # a weight larger than a core's cache
        (1 << 14, 128, {"products": "float32"}, 4),  # many multiplications
        (64, 128, {}, 4),
    ],
)
def test_beside_mkl_small_layers_in_float32_read_plain_copies(
    rows: int, width: int, options: dict[str, Any], number: int
) -> None:
    with torch.no_grad():
        assert packed(layers(width, width), torch.randn(rows, width), **options)[0] == number


def functional() -> nn.Module:
    return Net(lambda m, x: F.linear(x, m.weight.t()) + x @ m.weight, weight=weight(64, 64))


def biased(part: slice) -> nn.Module:
    """`part`: of a vector of 128 numbers, as the bias."""
    return Net(lambda m, x: F.linear(x, m.weight, m.vector[part]), weight=weight(64, 64), vector=weight(128))


def computed() -> nn.Module:
    return Net(lambda m, x: F.linear(x, m.weight, (x.t() @ x)[:, 1]), weight=weight(64, 64))


DECLINES: list[tuple[dict[str, Any], dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]]] = [
    # options, and layers with the shape of what they are given
    (
        {},
        {
            "a view of a weight, and a plain product": (functional, (3, 64)),
            "one number for all features": (lambda: biased(slice(1)), (3, 64)),
            "a bias whose numbers lie apart": (lambda: biased(slice(None, None, 2)), (3, 64)),
            "a computed bias": (computed, (3, 64)),
            "too small": (lambda: layers(64, 63), (3, 64)),
            "images of one channel": (lambda: nn.Conv2d(1, 8, 3), (2, 1, 9, 9)),
            "an image without a batch": (lambda: nn.Conv2d(4, 8, 3), (4, 9, 9)),
            "a transposed convolution": (lambda: nn.ConvTranspose2d(4, 8, 3), (2, 4, 9, 9)),
            "a convolution in 1-D": (lambda: nn.Conv1d(4, 8, 3), (2, 4, 9)),
        },
    ),
    *(  # no copies, and a dtype without packed products
        (options, {"layers": (layers, (3, 64)), "a convolution": (lambda: nn.Conv2d(4, 8, 3), (2, 4, 9, 9))})
        for options in ({"weights": "every_call"}, {"dtype": torch.float16})
    ),
]


def side_by_side(m: Any, inputs: list[Tensor]) -> list[Tensor]:
    return [layer(x) for layer, x in zip(m.layers, inputs, strict=True)]


@pytest.mark.parametrize(("options", "cases"), DECLINES)
def test_declines(options: dict[str, Any], cases: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]) -> None:
    model = Net(side_by_side, layers=nn.ModuleList(make() for make, _ in cases.values()))
    with torch.no_grad():
        (graph,) = rewritten(
            model, [torch.randn(shape) for _, shape in cases.values()], lower="inductor", products="torch", **options
        )
    packed_layers = [node for node in graph.graph.graph.nodes if node.target in (PACKED_LINEAR, PACKED_CONV)]
    assert [[*cases][int(module_path(node).split(".")[1])] for node in packed_layers] == []


def activated(m: Any, x: Tensor) -> Tensor:
    """GELUs of each form that alone read a layer; one whose layer is read twice, one in float32; an unread layer."""
    a, b, c, d = m.layers
    x = F.gelu(b(F.gelu(a(x))), approximate="tanh")
    read_twice = c(x)
    a(x.unsqueeze(0))
    return F.gelu(d(F.gelu(read_twice) + read_twice).float())


@pytest.mark.parametrize(
    ("options", "taken_in"), [pytest.param({}, 0, marks=pytest.mark.ci), ({"numerics": "relaxed"}, 2)]
)
def test_a_relaxed_product_takes_the_gelu_that_alone_reads_it(options: dict[str, Any], taken_in: int) -> None:
    model, x = Net(activated, layers=nn.ModuleList(nn.Linear(64, 64) for _ in range(4))), torch.randn(3, 64)
    with torch.no_grad():
        (graph,) = rewritten(model, x, lower="inductor", products="torch", **options)
        assert count(graph, GELU) == 4 - taken_in
        assert [node.args[4] for node in graph.graph.graph.nodes if node.target is PACKED_LINEAR and node.args[4:]] == [
            "none",
            "tanh",
        ][:taken_in]
        exact = copy.deepcopy(model).double()(x.double())
        ours = torch.compile(model, backend="amp", options={"products": "torch", **options})(x)
        with torch.autocast("cpu"):
            eager = model(x)
    assert (ours - exact).norm() <= 1.1 * (eager - exact).norm()


def convolutions() -> nn.Module:
    """Plain, strided, depthwise, dilated, grouped, and the two of a squeeze-and-excitation, on one pixel."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.body(x)
        return x * torch.sigmoid(m.excite(torch.relu(m.squeeze(x.mean((2, 3), keepdim=True)))))

    body = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, (3, 1), padding=(1, 0), groups=16, bias=False), nn.Conv2d(16, 24, 3, dilation=2, groups=2)),
    )
    return Net(forward, body=body, squeeze=nn.Conv2d(24, 8, 1), excite=nn.Conv2d(8, 24, 1))


def test_fires_on_convolutions() -> None:
    x, of_one_pixel = torch.randn(2, 3, 18, 20), ConvBlocks((1, 1), (0, 0), (1, 1), 1)
    with torch.no_grad():
        number, blocks = packed(convolutions().eval(), x)
        assert packed(convolutions().eval(), x, products="float32")[0] == 5
    assert number == 5 and blocks[:4] == [None] * 4, "biases"
    assert blocks[4:] == [
        ConvBlocks((2, 2), (1, 1), (1, 1), 1),
        ConvBlocks((1, 1), (1, 0), (1, 1), 16),
        ConvBlocks((1, 1), (0, 0), (2, 2), 2),
        *[of_one_pixel] * 2,
    ]
    assert [each.input_size for each in blocks[4:6]] == [(2, 3, 18, 20), (2, 16, 9, 10)]


def test_settings_by_name_are_understood() -> None:
    class Named(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return torch.conv2d(input=x, weight=self.weight, stride=2, padding=[1, 2])

    with torch.no_grad():
        number, blocks = packed(Named(4, 8, 3), torch.randn(2, 4, 9, 9))
    assert number == 1 and blocks == [ConvBlocks((2, 2), (1, 2), (1, 1), 1)]


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (torch.contiguous_format, [(2, 18, 20)]),
        pytest.param(torch.contiguous_format, [(2, 18, 20), (3, 24, 15)], marks=pytest.mark.slow),  # then for any size
        pytest.param(torch.channels_last, [(2, 18, 20), (3, 24, 15)], marks=pytest.mark.ci),
    ],
)
def test_convolutions_have_the_bits_and_strides_of_plain_ones(
    layout: torch.memory_format, sizes: list[tuple[int, int, int]]
) -> None:
    model, results = convolutions().to(memory_format=layout).eval(), []
    inputs = [torch.randn(n, 3, height, width).contiguous(memory_format=layout) for n, height, width in sizes]
    for weights in ("cached", "every_call"):
        torch._dynamo.reset()
        run = torch.compile(copy.deepcopy(model), backend="amp", options={"weights": weights, "products": "torch"})
        found = []
        with torch.no_grad():
            for x in inputs:
                found += [run(x) for _ in range(PAYS + 1)]
            run.body[0].weight.mul_(2)
            found += [run(x) for x in inputs for _ in range(PAYS + 1)]
        results.append(found)
    with torch.no_grad(), torch.autocast("cpu"):
        expected = [model(x) for x in inputs]
    for ours, plain in zip(*results, strict=True):
        assert same_bits(ours, plain) and ours.stride() == plain.stride()
    assert [found.stride() for found in results[0][:: PAYS + 1]][: len(sizes)] == [y.stride() for y in expected]
    assert torch.allclose(results[0][0], expected[0].float(), rtol=0.05, atol=0.05)


def test_a_dimension_of_size_one_may_have_any_stride() -> None:
    # Channels-last for Inductor, which passes over such dimensions, but not for ATen, which looks at all strides.
    conv, x = nn.Conv2d(16, 8, (3, 1), padding=1), torch.randn(12, 14, 16).bfloat16()
    pixels = x[:2, 0, :, None, None]
    seen = [x.permute(2, 0, 1).unsqueeze(0), x.transpose(1, 2).unsqueeze(3), pixels, pixels.contiguous(), pixels[:1]]
    run = torch.compile(lambda *xs: [conv(x) for x in xs], backend="amp", options={"products": "torch"})
    with torch.no_grad():
        with torch.autocast("cpu"):
            expected = [conv(x) for x in seen]
        for _ in range(PAYS + 1):
            for found, result in zip(run(*seen), expected, strict=True):
                assert torch.allclose(found, result.float(), rtol=0.02, atol=0.02)


def test_same_bits_and_the_next_call_sees_an_update() -> None:
    x, plain, results = torch.randn(5, 64), layers(), []
    for weights in ("cached", "every_call"):
        model = copy.deepcopy(plain)
        compiled = torch.compile(model, backend="amp", options={"weights": weights, "products": "torch"})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found = []
        for calls in (1, PAYS + 1, 1):  # plain weights, then packed ones, then plain ones again
            with torch.no_grad():
                found += [compiled(x) for _ in range(calls)]
            optimizer.zero_grad()
            found.append(compiled(x))
            found[-1].square().sum().backward()
            optimizer.step()
        results.append(found)
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
