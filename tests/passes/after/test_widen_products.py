"""Products of emulated types, and small ones, run in float32: which, on which operands, with which numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ampcompile.kernels.packed_linear import PACKED_LINEAR
from ampcompile.passes.after.bind_weights import BindWeights
from ampcompile.passes.after.widen_products import WidenProducts
from ampcompile.passes.analysis.commuting import CONVERT
from ampcompile.passes.analysis.products import WideProducts
from ampcompile.passes.weight_copy import weight_copy
from ampcompile.torch_private import processor
from tests.compiling import same_bits

aten = torch.ops.aten
LOW, HALF = torch.bfloat16, torch.float16
WIDEN = WidenProducts(WideProducts(frozenset({LOW, HALF})))


def traced(f: Callable[..., Any], *args: Tensor) -> GraphModule:
    return make_fx(f, tracing_mode="fake")(*args)


def count(gm: GraphModule, *ops: Any) -> list[int]:
    gm.graph.lint()
    return [len(gm.graph.find_nodes(op="call_function", target=op)) for op in ops]


def low(*shape: int, dtype: torch.dtype = LOW) -> Tensor:
    return torch.randn(*shape).to(dtype)


def attention(x: Tensor) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu.default(x, x, x, 0.0, True)


def attention_to(query: Tensor, key: Tensor) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu.default(query, key, key, 0.0, False)


def attention_gradient(query: Tensor, key: Tensor) -> Any:
    rows = query[..., 0].float()
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return backward(query, query, key, key, query, rows, 0.0, False)


def convolution_gradients(x: Tensor, w: Tensor) -> Any:
    out = [0, 0]
    return aten.convolution_backward.default(x, x, w, [3], [1, 1], out, [1, 1], False, out, 1, [True, True, True])


FIRES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(5, 7), (7, 3)]),
    "mm of views": (lambda a, b: a.t() @ b[1:].t(), [(7, 5), (4, 7)]),
    "addmm of one number": (lambda c, a, b: torch.addmm(c, a, b), [(1,), (64, 256), (256, 256)]),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), [(3,), (5, 7), (7, 3)]),
    "bmm": (torch.bmm, [(2, 5, 7), (2, 7, 3)]),
    "baddbmm": (torch.baddbmm, [(2, 5, 3), (2, 5, 7), (2, 7, 3)]),
    "mv": (torch.mv, [(5, 7), (7,)]),
    "dot": (torch.dot, [(7,), (7,)]),
    "convolution": (lambda x, w: aten.convolution(x, w, None, [1], [1], [1], False, [0], 1), [(2, 3, 9), (4, 3, 3)]),
    "transposed": (lambda x, w: aten.convolution(x, w, None, [2], [0], [1], True, [0], 1), [(2, 3, 9), (3, 4, 3)]),
    "its gradients": (convolution_gradients, [(2, 3, 5, 5), (3, 3, 1, 1)]),
    "attention": (attention, [(1, 2, 48, 8)]),
}


@pytest.mark.parametrize("dtype", [LOW, HALF])
@pytest.mark.parametrize("name", FIRES)
def test_fires_and_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    f, shapes = FIRES[name]
    args = [low(*shape, dtype=dtype) for shape in shapes]
    gm = traced(f, *args)
    assert WIDEN.apply(gm) == 1
    gm.graph.lint()
    gm.recompile()
    wide = [n for n in gm.graph.nodes if n.target is CONVERT and n.args[1] is torch.float32]
    assert wide, "its operands are widened"
    found, before = gm(*args), f(*args)
    exact = f(*(arg.double() for arg in args))
    results = zip(*(v if isinstance(v, tuple) else (v,) for v in (found, before, exact)), strict=True)
    for ours, theirs, true in results:
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        ulp = torch.finfo(ours.dtype).eps * true.abs().clamp_min(1e-3)
        assert ((ours.double() - true).abs() <= 0.51 * ulp + 1e-5 * true.abs().max()).all()
    assert WIDEN.apply(gm) == 0


@pytest.mark.parametrize(
    ("f", "dtype", "device"),
    [(lambda x: x @ x.t(), torch.float32, "cpu"), (lambda x: x @ x.t(), LOW, "meta"), (lambda x: x * x, LOW, "cpu")],
    ids=["float32", "another device", "no product"],
)
def test_declines(f: Callable[..., Any], dtype: torch.dtype, device: str) -> None:
    gm = traced(f, torch.ones(3, 3, dtype=dtype, device=device))
    assert WIDEN.apply(gm) == 0


def test_a_product_that_writes_float32_isnt_rounded() -> None:
    a, b = low(5, 7), low(7, 3)
    with torch._subclasses.FakeTensorMode():
        gm = make_fx(lambda a, b: aten.mm.dtype(a, b, torch.float32))(
            *(torch.empty(t.shape, dtype=LOW, device="cuda") for t in (a, b))
        )
    for node in gm.graph.nodes:  # no CPU kernel: the graph is written as if there were one
        if isinstance(node.meta.get("val"), torch.Tensor):
            with node.meta["val"].fake_mode:
                node.meta["val"] = torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype)
    assert WIDEN.apply(gm) == 1
    gm.recompile()
    assert count(gm, aten.mm.dtype, aten.mm.default) == [0, 1]
    assert torch.equal(gm(a, b), a.float() @ b.float())


def test_a_copy_held_as_float32_is_read_as_it_is() -> None:
    weight = torch.randn(6, 4)
    copy, x = weight.to(LOW).float(), low(5, 4)

    def f(w: Tensor, c: Tensor, x: Tensor) -> Any:
        read = weight_copy(w, c, LOW)
        return x @ read.t(), read.view(-1)[:3] * 2

    gm = traced(f, weight, copy, x)
    assert BindWeights().apply(gm) == 1 and WIDEN.apply(gm) == 1
    gm.graph.eliminate_dead_code()
    gm.recompile()
    (product,) = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
    turned = product.args[1]
    assert turned.target is aten.t.default and turned.args[0].op == "placeholder"
    found = gm(weight, copy, x)
    assert same_bits(found, ((x.float() @ copy.t()).to(LOW), copy.to(LOW).view(-1)[:3] * 2))


LARGE: dict[str, tuple[int, Callable[..., Any], list[tuple[int, ...]]]] = {  # the products that go to oneDNN
    "with a bias": (1, lambda a, b, c: torch.addmm(c, a, b), [(64, 256), (256, 256), (256,)]),
    "without": (1, lambda a, b, c: (a @ b) * 1, [(64, 256), (256, 256), (256,)]),
    "few rows": (0, lambda a, b, c: torch.addmm(c, a, b), [(4, 256), (256, 1024), (1024,)]),
    "few rows without": (0, lambda a, b, c: (a @ b) * 1, [(4, 256), (256, 1024), (1024,)]),
    # oneDNN reads its bias as numbers side by side, one for each column.
    "a bias of one number": (0, lambda a, b, c: torch.addmm(c[:1], a, b), [(64, 256), (256, 256), (512,)]),
    "numbers of a bias far apart": (0, lambda a, b, c: torch.addmm(c[::2], a, b), [(64, 256), (256, 256), (512,)]),
    "a computed bias": (0, lambda a, b, c: torch.addmm((c * 2)[:256], a, b), [(64, 256), (256, 256), (512,)]),
    "a part of an input": (1, lambda a, b, c: torch.addmm(c[256:], a, b), [(64, 256), (256, 256), (512,)]),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_products_go_to_onednn(name: str) -> None:
    number, f, shapes = LARGE[name]
    args = [low(*shape) for shape in shapes]
    gm = traced(f, *args)
    assert WIDEN.apply(gm) == 1
    gm.recompile()
    assert count(gm, PACKED_LINEAR) == [number and torch.backends.mkldnn.is_available()]
    exact = f(*(arg.double() for arg in args))
    assert (gm(*args).double() - exact).abs().max() <= torch.finfo(LOW).eps * exact.abs().max()


def test_none_goes_to_onednn_where_mkl_is_at_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "suits_mkl", lambda: True)
    _, f, shapes = LARGE["with a bias"]
    gm = traced(f, *(low(*shape) for shape in shapes))
    assert WIDEN.apply(gm) == 1 and count(gm, PACKED_LINEAR) == [0]


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [-1, 0], [-2, -1]])
def test_a_permutation_may_turn_nothing(order: list[int]) -> None:
    weight, x = torch.randn(256, 256), low(64, 256)
    copy = weight.to(LOW).float()
    gm = traced(lambda w, c, x: x @ aten.permute(weight_copy(w, c, LOW), order), weight, copy, x)
    assert BindWeights().apply(gm) == 1 and WIDEN.apply(gm) == 1
    gm.recompile()
    exact = x.double() @ copy.double().permute(order)
    assert (gm(weight, copy, x).double() - exact).abs().max() <= torch.finfo(LOW).eps * exact.abs().max()


SMALL = WidenProducts(WideProducts(small=True))
DENSE = WidenProducts(WideProducts(dense=frozenset({LOW})))
STARTS_SLOWLY = [name for name in FIRES if name not in ("addmm of one number", "mv", "dot", "attention")]


@pytest.mark.parametrize("name", FIRES)
def test_small_products_of_any_type_run_in_float32(name: str) -> None:
    f, shapes = FIRES[name]
    args = [low(*shape) for shape in shapes]
    gm, all_wide = traced(f, *args), traced(f, *args)
    assert SMALL.apply(gm) == (name in STARTS_SLOWLY)
    if name in STARTS_SLOWLY:
        WIDEN.apply(all_wide)
        assert same_bits(gm(*args), all_wide(*args))


@pytest.mark.parametrize("sizes", ["fake", "symbolic"])
def test_what_many_numbers_are_widened_for_stays(sizes: str) -> None:
    gms = [make_fx(torch.mm, tracing_mode=sizes)(low(rows, 64), low(64, 64)) for rows in (32, 128)]
    assert [SMALL.apply(gm) for gm in gms] == [1, 0]
    assert SMALL.apply(traced(torch.mm, low(1, 512), low(512, 512))) == 0


OF_A_DENSE_TYPE: dict[str, tuple[int, Callable[..., Any], list[tuple[int, ...]]]] = {
    "many rows": (1, torch.mm, [(64, 128), (128, 128)]),
    "few rows": (0, torch.mm, [(16, 512), (512, 512)]),
    "a batch": (1, torch.bmm, [(2, 64, 128), (2, 128, 128)]),
    "a vector": (0, torch.mv, [(512, 512), (512,)]),
    "convolution": (
        1,
        lambda x, w: aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        [(1, 16, 9, 9), (16, 16, 3, 3)],
    ),
    "attention": (1, attention, [(1, 2, 64, 8)]),
    "of few numbers": (0, attention, [(1, 2, 16, 8)]),
    "of one number to many": (0, attention_to, [(1, 2, 1, 8), (1, 2, 1024, 8)]),
    "its gradient": (1, attention_gradient, [(1, 2, 64, 8), (1, 2, 64, 8)]),
    "few gradients": (0, attention_gradient, [(1, 2, 16, 8), (1, 2, 64, 8)]),
}


@pytest.mark.parametrize("name", OF_A_DENSE_TYPE)
def test_what_arithmetic_decides_runs_in_float32_where_units_are_slow(name: str) -> None:
    number, f, shapes = OF_A_DENSE_TYPE[name]
    assert DENSE.apply(traced(f, *(low(*shape) for shape in shapes))) == number
    other = traced(f, *(low(*shape, dtype=HALF) for shape in shapes))
    assert DENSE.apply(other) == 0, "the other type's units are fast"
    if "numbers" in name or "gradient" in name:  # attention is dense or not where the type is emulated, too
        assert WIDEN.apply(traced(f, *(low(*shape) for shape in shapes))) == number


@pytest.mark.parametrize("wide", [SMALL, DENSE], ids=["small", "dense"])
def test_gradients_of_float16_convolutions_always_run_in_float32(wide: WidenProducts) -> None:
    """They have no oneDNN kernel, and ATen's took 523 ms beside 2.1 in float32 (64 channels, 56 x 56 pixels)."""
    shapes = [(2, 64, 32, 32), (64, 64, 1, 1)]
    for dtype in (HALF, LOW):
        gm = traced(lambda x, w: convolution_gradients(x, w)[:2], *(low(*shape, dtype=dtype) for shape in shapes))
        assert wide.apply(gm) == (dtype == HALF or wide is DENSE)


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
    assert WIDEN.apply(gm) == 1
    assert binding and [node for node in gm.graph.nodes if node.meta.get("unbacked_bindings")] == binding
