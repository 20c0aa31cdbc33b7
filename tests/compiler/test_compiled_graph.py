"""A call of a compiled graph gives it copies of weights, up to date, and marks those of what it writes as stale."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from ampcompile import weights
from ampcompile.compiler.compiled_graph import CompiledGraph
from ampcompile.config import Options
from ampcompile.kernels.packed_conv import Blocks
from ampcompile.kernels.packed_linear import LinearBlocks
from ampcompile.sharding.weight import Gather
from ampcompile.weights import CopySpec, Form
from tests.compiling import LOW


def run_alone(*args: Any) -> Any:
    return args


def test_a_graph_that_needs_nothing_is_installed_as_it_was_compiled() -> None:
    assert CompiledGraph(run_alone, Options()).installed() is run_alone


def spec(weight: int, blocks: Blocks | None = None) -> CopySpec:
    return CopySpec(weight, Form(LOW), blocks)


@pytest.mark.parametrize("read", [[1], [2, 1]])
def test_a_graph_gets_its_copies_after_its_inputs(read: list[int]) -> None:
    inputs = torch.randn(2), nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(4))
    run = CompiledGraph(lambda *args: args, Options(), [spec(i) for i in read])
    for _ in range(2):
        given = run(*inputs)
        assert given[:3] == inputs
        assert [copy.tolist() for copy in given[3:]] == [inputs[i].detach().to(LOW).tolist() for i in read]
        with torch.no_grad():
            inputs[1].add_(1)


@pytest.mark.parametrize("replayed", [False, True])
def test_copies_keep_their_addresses_where_cuda_graphs_replay(replayed: bool) -> None:
    weight = nn.Parameter(torch.randn(3))
    run = CompiledGraph(lambda *args: args, Options(inductor=(("triton.cudagraphs", replayed),)), [spec(0)])
    first = run(weight)[1]  # still held, as by a backward
    with torch.no_grad():
        weight.add_(1)
    assert (run(weight)[1].data_ptr() == first.data_ptr()) == replayed


def test_where_all_is_fake_the_copies_are_shapes() -> None:
    run = CompiledGraph(lambda *args: args, Options(), [spec(0), spec(0, LinearBlocks())])
    with FakeTensorMode():
        weight = torch.empty(4, 6).t().requires_grad_()
        _, strided, packed = run(weight)
    assert [(c.dtype, c.shape, c.requires_grad) for c in (strided, packed)] == [(LOW, (6, 4), False)] * 2
    assert strided.stride() == (1, 6) and packed.stride() == (4, 1)


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_graph_writes_below_autograd_is_cast_again(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(weights, "invalidate", told.append)

    def run(*args: Any) -> Any:
        assert not told, "once it has run"
        if fails:
            raise KeyError
        return args[0] * 2

    wrapped = CompiledGraph(run, Options(), written=[2, 0])
    if fails:
        with pytest.raises(KeyError):
            wrapped(1, 2, 3)
    else:
        assert wrapped(1, 2, 3) == 2
    assert told == [[3, 1]]


def test_of_what_a_graph_for_any_number_of_rows_writes_below_autograd_only_tensors_are_cast_again() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        found = torch.einsum("ij,jk->ik", x, w)
        part = found[:]
        found.data.mul_(0.5)
        return part

    run = torch.compile(f, backend="amp", dynamic=True, options={"lower": "eager", "outputs": "autocast"})
    w = torch.randn(8, 8)
    for rows in (4, 6):
        x = torch.randn(rows, 8)
        with torch.autocast("cpu"):
            expected = f(x, w)
        assert torch.equal(run(x, w), expected)


def test_copies_of_gathered_weights_stand_in_order_among_those_that_are_kept() -> None:
    first, last = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(3))
    layer, gather = nn.Linear(4, 3), Gather("weight")
    numbers = torch.randn(3, 4).to(LOW)
    gather.param = SimpleNamespace(low_numbers=lambda dtype: numbers)
    gather.attach(layer.weight)
    specs = [spec(0), replace(spec(1), gathered=True), spec(2)]
    run = CompiledGraph(lambda *args: args, Options(), specs, sharded={1: ""}).installed()
    given = run(first, layer.weight, last)
    assert given[4] is numbers and gather.rounded_to == {LOW} and not gather.reader
    for kept, weight in ((given[3], first), (given[5], last)):
        assert torch.equal(kept, weight.detach().to(LOW))
    run = CompiledGraph(lambda *args: args, Options(), specs, sharded={1: "aten.mul in a compiled graph"}).installed()
    run(first, layer.weight, last)
    assert gather.reader == "aten.mul in a compiled graph"
