"""Random chains on the made-up GPU: a fused kernel has the bits of the same ops in a kernel each, gradients too."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.fx_passes import joint_graph
from torch._inductor.pattern_matcher import Match, PatternMatcherPass
from torch.fx import GraphModule

from ampcompile.passes.analysis.commuting import CONVERT
from ampcompile.torch_private import lowering
from tests.behaviour import test_chains
from tests.behaviour.programs import BINARY, REDUCING, SCALAR, UNARY, Chain
from tests.behaviour.test_chains import WriteAll
from tests.compiling import change_passes

pytestmark = pytest.mark.emulated
COUNT, GROUPS = 10, 4 if lowering.CASTS_NEED_MARKS else 20
"""Chains in one graph, and graphs: fewer on torch 2.11, which `make matrix` runs beside much else."""
SHARES = {UNARY: 8, SCALAR: 6, BINARY: 6, REDUCING: 6}
"""Without products, which are no kernels of Triton's."""


@dataclass(frozen=True)
class FactorsBehindMaxima:
    """Inductor's own rewrite of a softmax of x * c as one of (x - max(x)) * c, in float32 alone.

    It isn't fusing, changes last bits of float32, and loses no rounding to 16 bits. On the CPU softmax is in 16 bits.
    """

    name = "factors_behind_maxima"
    exact = False
    fate = ""

    def apply(self, gm: GraphModule) -> int:
        chosen = PatternMatcherPass()
        for key, entries in joint_graph.pass_patterns[1].patterns.items():
            chosen.patterns[key] = [replace(each, extra_check=partial(is_wide, each.extra_check)) for each in entries]
        return chosen.apply(gm.graph)


def is_wide(check: Callable[[Match], bool], match: Match) -> bool:
    """Whether a match is of float32 alone, its operand too, and passes a check."""
    values = [*match.nodes, match.kwargs["inp"]]
    return {node.meta["val"].dtype for node in values} == {torch.float32} and check(match)


@dataclass(frozen=True)
class NameTypesByPosition:
    """Undoes the mend for torch 2.11, which drops a cast that is widened again if the type stands at its position."""

    name = "name_types_by_position"
    exact = False
    fate = ""

    def apply(self, gm: GraphModule) -> int:
        casts = [node for node in gm.graph.find_nodes(op="call_function", target=CONVERT) if node.kwargs]
        for node in casts:
            node.args, node.kwargs = (node.args[0], node.kwargs["dtype"]), {}
        return len(casts)


def sum_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have kernels add up in float64: Triton chooses the order, by how the kernel's other values lie in threads."""
    define, sums = TritonScheduling.define_kernel, re.compile(r"\btl\.sum\((\w+), ")

    def define_exact(self: Any, source: str, *rest: Any) -> Any:
        return define(self, sums.sub(r"tl.sum(\1.to(tl.float64), ", source), *rest)

    monkeypatch.setattr(TritonScheduling, "define_kernel", define_exact)


def differing(dtype: torch.dtype, group: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Chain]:
    """The chains of a group that fusing with these options changes."""
    sum_in_any_order(monkeypatch)
    torch._dynamo.reset()
    seeds = [1000 * group + i for i in range(COUNT)]
    chains = [Chain.drawn(seed, SHARES) for seed in seeds]
    inputs = [x.cuda() for chain, seed in zip(chains, seeds, strict=True) for x in chain.inputs(seed)]
    return test_chains.differing(chains, inputs, dtype, monkeypatch, (WriteAll(), FactorsBehindMaxima()), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", range(GROUPS))
def test_fusing_changes_no_bit(dtype: torch.dtype, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not differing(dtype, group, monkeypatch)


def test_lost_roundings_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(differing(torch.bfloat16, 0, monkeypatch, numerics="relaxed")) > COUNT // 4


@pytest.mark.skipif(not lowering.CASTS_NEED_MARKS, reason="what torch 2.11 loses, later ones keep")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_by_position_lose_roundings(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    change_passes(monkeypatch, add=[NameTypesByPosition()])
    assert len(differing(dtype, 0, monkeypatch)) > COUNT // 2
