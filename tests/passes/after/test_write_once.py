"""What `erf` gives is computed once where a sum reads it, and marked nowhere else."""

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompile.passes.after.write_once import WriteOnce
from ampcompile.torch_private import lowering
from tests.compiling import HIGH, LOW, gradients_and_code, leave_out, same_bits


def gelu(x: Tensor) -> Tensor:
    h = x.to(HIGH)
    return (h * 0.5 * (torch.erf(h * 0.7) + 1)).to(LOW)


CASES = {  # a function, and the op whose value is written
    "a norm": (lambda x: (lambda g: g - torch.var_mean(g, -1, keepdim=True)[1])(gelu(x).to(HIGH)), "_to_copy"),
    "a sum, and another op": (lambda x: (gelu(x).sum(), gelu(x)), ""),
    "one value of both": (lambda x: (lambda g: g / g.sum())(gelu(x)), "_to_copy"),
    "float32": (lambda x: (lambda g: g / g.sum())(torch.erf(x.to(HIGH)) * 2), "mul"),
    "a sum alone": (lambda x: gelu(x).to(HIGH).sum(), ""),
    "elementwise ops": (lambda x: gelu(x) * 2 + gelu(x).neg(), ""),
    "a gate": (lambda x: (lambda g: (g * x, g + x))(gelu(x)), ""),
    "another function": (lambda x: (lambda g: g / g.sum())(x.exp()), ""),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_marked(name: str) -> None:
    f, expected = CASES[name]
    gm = make_fx(f, tracing_mode="fake")(torch.randn(4, 8, dtype=LOW))
    marked = WriteOnce().apply(gm)
    names = [node.target._schema.name for node in gm.graph.nodes if lowering.WRITE_TO_MEMORY in node.meta]
    assert names == [f"aten::{expected}"] * bool(expected) and marked == len(names)
    assert WriteOnce().apply(gm) == 0


def test_only_on_cpus() -> None:
    gm = make_fx(CASES["a norm"][0], tracing_mode="fake")(torch.randn(4, 8, dtype=LOW, device="meta"))
    assert WriteOnce().apply(gm) == 0


@pytest.mark.ci
def test_each_graph_computes_it_once_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)), torch.randn(16, 32)
    once, code = gradients_and_code(model, x, monkeypatch)
    leave_out(WriteOnce(), monkeypatch)
    each_time, more = gradients_and_code(model, x, monkeypatch)
    assert same_bits(once, each_time)
    counts = [[graph.count(".erf()") for graph in each] for each in (code, more)]
    assert [after < before for after, before in zip(*counts, strict=True)] == [True, True]
