"""Inductor and AOTAutograd take our joint-graph pass, decompositions, settings and lowerings."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch._inductor.dependencies import MemoryDep, ReadWrites
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._ordered_set import OrderedSet

from ampcompile.torch_private import lowering
from tests.compiling import Looking

Backend = Callable[[GraphModule, Any], Any]


def halve_cosines(gm: GraphModule) -> None:
    """What stands for our passes: backward of `sin` is told by its `cos`, which becomes half of it."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default):
        with gm.graph.inserting_after(node):
            half = gm.graph.call_function(torch.ops.aten.mul.Tensor, (node, 0.5))
        half.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(half, delete_user_cb=lambda user, half=half: user is not half)


def with_inductor(act: Callable[[GraphModule], Any], key: str = "1") -> Backend:
    table = lowering.inductors_decompositions(kept=[])
    return lambda gm, inputs: lowering.inductor(gm, inputs, {}, act, key, table)


def with_eager_kernels(act: Callable[[GraphModule], Any]) -> Backend:
    return lambda gm, inputs: lowering.aot_eager(gm, inputs, act)


@pytest.mark.parametrize("lower", [with_inductor, with_eager_kernels])
@pytest.mark.parametrize("training", [True, False])
def test_forward_and_backward_are_seen_together_and_changed(lower: Callable[..., Backend], training: bool) -> None:
    seen: list[int] = []

    def act(gm: GraphModule) -> None:
        seen.append(len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)))
        halve_cosines(gm)

    x = torch.randn(5, requires_grad=training)
    run = torch.compile(lambda x: x.sin() if training else x.sin() + x.cos(), backend=lower(act))
    with torch._functorch.config.patch(enable_autograd_cache=False):  # what it holds isn't differentiated again
        result = run(x)
    assert seen == [1], "once, and backward's graph has forward's op"
    if training:
        result.sum().backward()
        torch.testing.assert_close(x.grad, x.detach().cos() / 2)
    else:
        torch.testing.assert_close(result, x.sin() + x.cos() / 2)


def test_the_table_of_decompositions_pickles_by_what_is_ours() -> None:
    before = pickle.dumps(lowering.inductors_decompositions(kept=[]))

    def ours(x: Tensor) -> Tensor:
        return x

    ours.__module__ = "ampcompile.compiler.decompositions"
    changed = lowering.inductors_decompositions(kept=[])
    changed[torch.ops.aten.sin.default] = ours
    assert pickle.dumps(lowering.inductors_decompositions(kept=[])) == before
    assert pickle.dumps(changed) != before


def test_an_op_whose_decomposition_refuses_is_called_if_it_is_kept() -> None:
    op = torch.ops.aten.embedding_dense_backward.default
    table = lowering.inductors_decompositions(kept=[op])
    table[op] = lambda *args: NotImplemented

    def backend(gm: GraphModule, inputs: Any) -> Any:
        return lowering.inductor(gm, inputs, {}, lambda gm: None, "kept", table)

    def f(grad: Tensor, rows: Tensor) -> Tensor:
        return op(grad, rows, 5, -1, False)

    grad, rows = torch.randn(3, 2), torch.tensor([1, 1, 4])
    result, (code,) = run_and_get_code(torch.compile(f, backend=backend), grad, rows)
    assert "aten.embedding_dense_backward" in code.partition("async_compile.wait")[2]
    assert torch.equal(result, f(grad, rows))


def test_graphs_with_loops_and_nested_regions_write_each_buffer_once() -> None:
    backend = Looking(lambda gm, inputs: lowering.config_for_bodies(gm))

    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    for f in (branch, lambda x: x.sin()):
        torch.compile(f, backend=backend)(torch.randn(3))
    careful = {"inplace_buffers": False, "allow_buffer_reuse": False}
    assert backend.found == [careful, {}]
    assert careful.keys() <= torch._inductor.config.get_config_copy().keys()


def test_roundings_on_a_gpu_make_inductor_write_no_more_values_to_memory() -> None:
    assert lowering.config_for_rounding(True, [torch.ones(2), 3]) == {"emulate_precision_casts": True}
    with FakeTensorMode():
        inputs = [torch.empty(2, device="cuda")]
    config = lowering.config_for_rounding(True, inputs)
    assert config == {"emulate_precision_casts": True, "realize_opcount_threshold": 40}
    assert config.keys() <= torch._inductor.config.get_config_copy().keys()
    assert lowering.config_for_rounding(False, inputs) == {"emulate_precision_casts": False}


def test_what_nested_regions_return_has_no_fake_values_left() -> None:
    def body(value: float) -> GraphModule:
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        returned = graph.call_function(torch.ops.aten.mul.Tensor, (x, value))
        x.meta["val"] = returned.meta["val"] = torch.ones(2)
        graph.output((returned,))
        return GraphModule({}, graph)

    graph = torch.fx.Graph()
    x, nested, other = graph.placeholder("x"), graph.get_attr("nested"), graph.get_attr("other")
    first = graph.call_function(torch.ops.higher_order.invoke_subgraph, (nested, "nested", x))
    second = graph.call_function(torch.ops.higher_order.cond, (True, other, other, (x,)))
    graph.output((first, second))
    gm = GraphModule({"nested": body(2.0), "other": body(3.0)}, graph)
    lowering.forget_output_values(gm)
    values = {
        name: ["val" in node.meta for node in getattr(gm, name).graph.nodes if node.op != "output"]
        for name in ("nested", "other")
    }
    assert values == {"nested": [True, False], "other": [True, True]}


def test_an_op_becomes_a_call_of_another() -> None:
    with torch.library._scoped_library("torch_private", "FRAGMENT") as library:
        library.define("halve(Tensor x, bool unused) -> Tensor")
        library.impl("halve", lambda x, unused: x / 2, "CompositeExplicitAutograd")
        op = torch.ops.torch_private.halve.default
        lowering.lower_as_call(op, torch.ops.aten.special_bessel_j1.default, lambda x, unused: (x,))
        x = torch.randn(3)
        run = torch.compile(lambda x: op(x, True), backend=with_inductor(lambda gm: None))
        assert torch.equal(run(x), torch.special.bessel_j1(x))


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (4,)])
def test_an_op_on_rows_becomes_a_call_on_a_matrix(shape: tuple[int, ...]) -> None:
    with torch.library._scoped_library("torch_private", "FRAGMENT") as library:
        library.define("multiply(Tensor x, Tensor matrix) -> Tensor")
        library.impl("multiply", lambda x, matrix: x @ matrix, "CompositeExplicitAutograd")
        op = torch.ops.torch_private.multiply.default
        lowering.lower_as_call(op, torch.ops.aten.mm.default, lambda x, matrix: (x, matrix), on_rows=True)
        x, matrix = torch.randn(shape), torch.randn(4, 5)

        def f(x: Tensor) -> tuple[Tensor, Tensor]:
            doubled = x * 2
            return op(doubled, matrix), doubled + 1

        product, other = torch.compile(f, backend=with_inductor(lambda gm: None))(x)
        assert product.shape == (*shape[:-1], 5) and torch.equal(other, x * 2 + 1)
        torch.testing.assert_close(product, (x * 2) @ matrix)


class Upsampled(torch.nn.Module):
    """What the end of a UNet is: an upsampled image beside another one, read by two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        conv = torch.nn.Conv2d
        self.below, self.skip, self.out = conv(16, 16, 3, padding=1), conv(24, 8, 1), conv(24, 8, 3, padding=1)
        self.norm = torch.nn.GroupNorm(8, 24)

    def both(self, x: Tensor, beside: Tensor) -> Tensor:
        return torch.cat([torch.nn.functional.interpolate(self.below(x), scale_factor=2.0), beside], 1)

    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        return self.skip(self.both(x, beside)) + self.out(self.norm(self.both(x, beside)))


@pytest.mark.ci
def test_a_gradient_that_is_summed_in_place_is_read_after_that() -> None:
    """Stock Inductor reads zeros there, up to torch 2.13."""
    module, x, beside = Upsampled(), torch.randn(2, 16, 8, 8, requires_grad=True), torch.randn(2, 8, 16, 16)
    (expected,) = torch.autograd.grad(module(x, beside).square().sum(), x)
    run = torch.compile(module, backend="amp")
    (found,) = torch.autograd.grad(run(x, beside).float().square().sum(), x)
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_loops_that_are_computed_anew_keep_the_names_of_later_writes() -> None:
    """Before torch 2.15 they read a buffer by its first name, and the write between is forgotten."""
    read = MemoryDep("first", sympy.Integer(0), (), ())
    node: Any = SimpleNamespace(mutation_renames={"first": "later"}, read_writes=None)
    node.set_read_writes = lambda found: setattr(node, "read_writes", found)

    def recompute(node: Any, of: MemoryDep) -> None:
        node.read_writes = ReadWrites(OrderedSet([of]), OrderedSet(), OrderedSet())

    lowering._rename_after_recompute(recompute)(node, read)
    assert [dep.name for dep in node.read_writes.reads] == ["later"]
