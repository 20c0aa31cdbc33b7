"""What 16-bit ops round is written as casts; what is 16 bits already isn't rounded; Inductor then forgets nothing."""

import uuid

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompile.compiler import lower
from ampcompile.passes.after.write_roundings import WriteRoundings
from ampcompile.passes.base import run_passes
from ampcompile.torch_private import lowering
from tests.compiling import HIGH, LOW, amp, gradients, leave_out, same_bits

CASES = {  # what is done to two matrices: the ops afterwards, `>` widens, `<` rounds, `!` is marked for Inductor
    "a sum": (lambda a, b: a + b, "> > add <"),
    "a number twice": (lambda a, b: a * a, "> mul <"),
    "an argument by name": (lambda a, b: torch.add(a, b, alpha=0.5), "> > add <"),
    "to float32": (lambda a, b: a * b.float(), "> > mul"),
    "a cube": (lambda a, b: a**3, "> mul < > > mul <"),
    "other powers": (lambda a, b: a**2, "> pow <"),
    "chosen": (lambda a, b: torch.where(a > b, a, b).maximum(a).relu(), "gt where maximum relu"),
    "chosen of what is rounded": (lambda a, b: (a + b).relu() * a, "> > add < relu > > mul <"),
    "chosen of two types": (lambda a, b: a.maximum(b.float()), "> > maximum"),
    "of a product": (lambda a, b: (a @ b).t().neg() * 2, "mm! t neg > mul <"),
    "of a reduction": (lambda a, b: a.sum(0).relu() + a.sum(0), "sum! relu! sum! > >! add <"),
    "of a pool": (lambda a, b: F.avg_pool2d(a[None], 2).sin(), "unsqueeze avg_pool2d! >! sin <"),
    "a kernel of eager's": (lambda a, b: torch.digamma(a), "digamma!"),
    "copied": (lambda a, b: a.clone(), "clone!"),
}


def graph(f, *args: Tensor) -> torch.fx.GraphModule:
    """With the marks that torch gives: of all ops that read or give 16-bit numbers."""
    gm = make_fx(f, tracing_mode="fake", decomposition_table={torch.ops.aten._to_copy.default: to_copy})(*args)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.meta[lowering.ROUNDS] = True
    return gm


def to_copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ops.prims.convert_element_type.default(x, dtype)


def text(gm: torch.fx.GraphModule) -> str:
    def word(node):
        name = node.target._schema.name.split("::")[1]
        cast = name == "convert_element_type"
        marked = "!" * (
            node.meta.get(lowering.ROUNDS, False)
            and not node.target.is_view
            and not (cast and lowering.CASTS_NEED_MARKS)
        )
        return (("<" if node.meta["val"].dtype == LOW else ">") if cast else name) + marked

    return " ".join(word(node) for node in gm.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("name", CASES)
def test_what_is_rounded_and_where(name):
    f, expected = CASES[name]
    gm = graph(f, torch.ones(4, 4, dtype=LOW), torch.ones(4, 4, dtype=LOW))
    changed = run_passes([WriteRoundings()], gm)[0].rewrites
    assert text(gm) == expected and bool(changed) == (">" in expected)
    assert WriteRoundings().apply(gm) == 0
    a, b = torch.rand(2, 4, 4, dtype=LOW)
    assert same_bits(gm(a, b), f(a, b))
