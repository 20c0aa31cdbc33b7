"""Products of emulated types, and small ones, run in float32: which, on which operands, with which numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ampcompile.kernels.packed_linear import PACKED_LINEAR
from ampcompile.passes.after.bind_weights import BindWeights
from ampcompile.passes.after.widen_products import WidenProducts
from ampcompile.passes.analysis.products import WideProducts
from ampcompile.passes.base import run_passes
from ampcompile.passes.weight_copy import weight_copy
from tests.compiling import HALF, HIGH, LOW, same_bits
from tests.passes.tidied import layouts, traced, words

aten = torch.ops.aten
ALL = WidenProducts(WideProducts(frozenset({LOW, HALF})))
SMALL = WidenProducts(WideProducts(small=True))
DENSE = WidenProducts(WideProducts(dense=frozenset({LOW})))
WHICH = {"all": ALL, "small": SMALL, "dense": DENSE}


def low(*shape: int, dtype: torch.dtype = LOW) -> Tensor:
    return torch.randn(*shape).to(dtype)


def attention(query: Tensor, key: Tensor) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu.default(query, key, key, 0.0, False)


def attention_gradient(query: Tensor, key: Tensor) -> Any:
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return backward(query, query, key, key, query, query[..., 0].float(), 0.0, False)


def convolution_gradients(x: Tensor, w: Tensor) -> Any:
    out = [0, 0]
    return aten.convolution_backward.default(x, x, w, [3], [1, 1], out, [1, 1], False, out, 1, [True, True, True])


def convolution(x: Tensor, w: Tensor, stride: int = 1, transposed: bool = False) -> Tensor:
    return aten.convolution(x, w, None, [stride], [0 if transposed else 1], [1], transposed, [0], 1)


ANY, EMULATED, UNITS = ("all small dense", "all small"), ("all", "all"), ("all dense", "all")
CASES: dict[str, tuple[tuple[str, str], int, Callable[..., Any], list[tuple[int, ...]]]] = {
    # of bfloat16 and of float16, the choices that run it in float32; how many go to oneDNN; the product; its shapes
    "mm": (ANY, 0, torch.mm, [(5, 7), (7, 3)]),
    "mm of views": (ANY, 0, lambda a, b: a.t() @ b[1:].t(), [(7, 5), (4, 7)]),
    "addmm": (ANY, 0, lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), [(3,), (5, 7), (7, 3)]),
    "bmm": (ANY, 0, torch.bmm, [(2, 5, 7), (2, 7, 3)]),
    "baddbmm": (ANY, 0, torch.baddbmm, [(2, 5, 3), (2, 5, 7), (2, 7, 3)]),
    "mv": (EMULATED, 0, torch.mv, [(5, 7), (7,)]),
    "mv of many numbers": (EMULATED, 0, torch.mv, [(512, 512), (512,)]),
    "dot": (EMULATED, 0, torch.dot, [(7,), (7,)]),
    "convolution": (ANY, 0, lambda x, w: convolution(x, w), [(2, 3, 9), (4, 3, 3)]),
    "transposed": (ANY, 0, lambda x, w: convolution(x, w, 2, True), [(2, 3, 9), (3, 4, 3)]),
    "convolution in 2-D": (ANY, 0, lambda x, w: convolution(x, w), [(1, 16, 9, 9), (16, 16, 3, 3)]),
    "its gradients": (("all small dense",) * 2, 0, convolution_gradients, [(2, 3, 5, 5), (3, 3, 1, 1)]),
    # of float16 they have no oneDNN kernel, and ATen's took 523 ms beside 2.1 in float32 (64 channels, 56 x 56 pixels)
    "its gradients, large": (
        ("all dense", "all small dense"),
        0,
        lambda x, w: convolution_gradients(x, w)[:2],
        [(2, 64, 32, 32), (64, 64, 1, 1)],
    ),
    "attention": (UNITS, 0, attention, [(1, 2, 48, 8), (1, 2, 48, 8)]),
    "attention of few numbers": (("", ""), 0, attention, [(1, 2, 16, 8), (1, 2, 16, 8)]),
    "attention of one number to many": (("", ""), 0, attention, [(1, 2, 1, 8), (1, 2, 1024, 8)]),
    "attention's gradient": (UNITS, 0, attention_gradient, [(1, 2, 64, 8), (1, 2, 64, 8)]),
    "attention's gradient, few": (("", ""), 0, attention_gradient, [(1, 2, 16, 8), (1, 2, 64, 8)]),
    "32 rows": (ANY, 0, torch.mm, [(32, 64), (64, 64)]),
    "128 rows": (UNITS, 0, torch.mm, [(128, 64), (64, 64)]),
    "one row": (EMULATED, 0, torch.mm, [(1, 512), (512, 512)]),
    "16 rows": (EMULATED, 1, torch.mm, [(16, 512), (512, 512)]),
    "a batch": (UNITS, 0, torch.bmm, [(2, 64, 128), (2, 128, 128)]),
    "large": (UNITS, 1, lambda a, b: (a @ b) * 1, [(64, 256), (256, 256)]),
    "large, with a bias": (UNITS, 1, lambda a, b, c: torch.addmm(c, a, b), [(64, 256), (256, 256), (256,)]),
    "few rows": (EMULATED, 0, lambda a, b: (a @ b) * 1, [(4, 256), (256, 1024)]),
    "few rows, with a bias": (EMULATED, 0, lambda a, b, c: torch.addmm(c, a, b), [(4, 256), (256, 1024), (1024,)]),
    # oneDNN reads its bias as numbers side by side, one for each column.
    "a bias of one number": (UNITS, 0, lambda a, b, c: torch.addmm(c, a, b), [(64, 256), (256, 256), (1,)]),
    "a part that is one number": (UNITS, 0, lambda a, b, c: torch.addmm(c[:1], a, b), [(64, 256), (256, 256), (512,)]),
    "a bias far apart": (UNITS, 0, lambda a, b, c: torch.addmm(c[::2], a, b), [(64, 256), (256, 256), (512,)]),
    "a computed bias": (UNITS, 0, lambda a, b, c: torch.addmm((c * 2)[:256], a, b), [(64, 256), (256, 256), (512,)]),
    "a part of an input": (UNITS, 1, lambda a, b, c: torch.addmm(c[256:], a, b), [(64, 256), (256, 256), (512,)]),
}


@pytest.mark.parametrize("dtype", [LOW, HALF])
@pytest.mark.parametrize("name", CASES)
def test_what_runs_in_float32_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    choices, onednn, f, shapes = CASES[name]
    args = [low(*shape, dtype=dtype) for shape in shapes]
    gms = {which: traced(f, *args) for which in WHICH}
    layout = layouts(gms["all"])
    assert (
        " ".join(which for which in WHICH if run_passes([WHICH[which]], gms[which])[0].rewrites)
        == choices[dtype == HALF]
    )
    for which in choices[dtype == HALF].split():
        gm = gms[which]
        assert words(gm).count("packed_linear") == (onednn and torch.backends.mkldnn.is_available())
        assert ">" in words(gm) and layouts(gm) == layout and WHICH[which].apply(gm) == 0
        if f is not attention_gradient:  # of numbers that no attention gave
            assert_rounded_once(gm(*args), f(*args), f(*(arg.double() for arg in args)))


def assert_rounded_once(ours: Any, theirs: Any, exact: Any) -> None:
    for found, before, true in zip(*(v if isinstance(v, tuple) else (v,) for v in (ours, theirs, exact)), strict=True):
        assert (found.dtype, found.shape, found.stride()) == (before.dtype, before.shape, before.stride())
        ulp = torch.finfo(found.dtype).eps * true.abs().clamp_min(1e-3)
        assert ((found.double() - true).abs() <= 0.51 * ulp + 1e-5 * true.abs().max()).all()


def test_symbolic_sizes_count_as_those_of_the_first_call() -> None:
    gms = [make_fx(torch.mm, tracing_mode="symbolic")(low(rows, 64), low(64, 64)) for rows in (32, 128)]
    assert [SMALL.apply(gm) for gm in gms] == [1, 0]


@pytest.mark.parametrize(
    ("f", "dtype", "device"),
    [(lambda x: x @ x.t(), HIGH, "cpu"), (lambda x: x @ x.t(), LOW, "meta"), (lambda x: x * x, LOW, "cpu")],
    ids=["float32", "another device", "no product"],
)
def test_declines(f: Callable[..., Any], dtype: torch.dtype, device: str) -> None:
    assert ALL.apply(traced(f, torch.ones(3, 3, dtype=dtype), device=device)) == 0


def test_a_product_that_writes_float32_isnt_rounded() -> None:
    a, b = low(5, 7), low(7, 3)
    gm = traced(lambda a, b: aten.mm.dtype(a, b, HIGH), a, b, device="cuda")
    for node in gm.graph.nodes:  # no CPU kernel: the graph is written as if there were one
        if isinstance(node.meta.get("val"), Tensor):
            with node.meta["val"].fake_mode:
                node.meta["val"] = torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype)
    assert ALL.apply(gm) == 1
    gm.recompile()
    assert words(gm) == "> > mm"
    assert torch.equal(gm(a, b), a.float() @ b.float())


def test_a_copy_held_as_float32_is_read_as_it_is() -> None:
    weight = torch.randn(6, 4)
    copy, x = weight.to(LOW).float(), low(5, 4)

    def f(w: Tensor, c: Tensor, x: Tensor) -> Any:
        read = weight_copy(w, c, LOW)
        return x @ read.t(), read.view(-1)[:3] * 2

    gm = traced(f, weight, copy, x)
    assert BindWeights().apply(gm) == 1 and ALL.apply(gm) == 1
    gm.graph.eliminate_dead_code()
    gm.recompile()
    (product,) = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
    turned = product.args[1]
    assert turned.target is aten.t.default and turned.args[0].op == "placeholder"
    found = gm(weight, copy, x)
    assert same_bits(found, ((x.float() @ copy.t()).to(LOW), copy.to(LOW).view(-1)[:3] * 2))


@pytest.mark.cpu(mkl=True)
def test_none_goes_to_onednn_where_mkl_is_at_its_best() -> None:
    *_, f, shapes = CASES["large, with a bias"]
    gm = traced(f, *(low(*shape) for shape in shapes))
    assert ALL.apply(gm) == 1 and "packed_linear" not in words(gm)


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [-1, 0], [-2, -1]])
def test_a_permutation_may_turn_nothing(order: list[int]) -> None:
    weight, x = torch.randn(256, 256), low(64, 256)
    copy = weight.to(LOW).float()
    gm = traced(lambda w, c, x: x @ aten.permute(weight_copy(w, c, LOW), order), weight, copy, x)
    assert BindWeights().apply(gm) == 1 and ALL.apply(gm) == 1
    gm.recompile()
    exact = x.double() @ copy.double().permute(order)
    assert (gm(weight, copy, x).double() - exact).abs().max() <= torch.finfo(LOW).eps * exact.abs().max()


def test_a_product_reads_a_copy_as_it_is_held_whatever_its_own_size() -> None:
    weight, x = torch.randn(512, 400), low(1, 400)
    for held, wide in ((weight.to(LOW), 0), (weight.to(LOW).float(), 1)):
        gm = traced(lambda w, c, x: x @ weight_copy(w, c, LOW).t(), weight, held, x)
        BindWeights().apply(gm)
        assert DENSE.apply(gm) == wide
        blocks = traced(lambda w, p, x: PACKED_LINEAR(x, w, p, None), weight, held, x)
        assert DENSE.apply(blocks) == wide


def test_what_reads_a_row_found_at_run_time_binds_no_offset() -> None:
    """A `select` by a number that a graph computes binds its offset; two nodes that do aren't lowered by Inductor."""
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def f(batch: Tensor, row: Tensor, w: Tensor) -> Tensor:
        return batch.select(0, row.item()) @ w

    with mode, torch._dynamo.config.patch(capture_scalar_outputs=True):
        args = [low(3, 5, 7), torch.tensor(1), low(7, 3)]
    gm = make_fx(f, tracing_mode="symbolic")(*args)
    binding = [node for node in gm.graph.nodes if node.meta.get("unbacked_bindings")]
    assert ALL.apply(gm) == 1
    assert binding and [node for node in gm.graph.nodes if node.meta.get("unbacked_bindings")] == binding
