"""Programs drawn by seeds: numbers as near to float64 as eager's, and the same bits however ops are fused.

Chains of ops; programs with keyword arguments beside products, and with writes in place.
"""

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ampcompile.compiler import inductor
from ampcompile.passes import pipeline
from ampcompile.passes.graph import graphs
from ampcompile.torch_private import dispatcher, lowering
from tests.behaviour.chains import IN_PLACE, INPUTS, KEYWORDS, STARTS, Chain, together
from tests.compiling import HALF, LOW, amp, eager, same_bits

CHAINS = 30
"""Chains in one graph: each then compiles in two seconds."""
ALONE = {"max_fusion_size": 1, "pattern_matcher": False}
Run = Callable[..., list[Tensor]]


@dataclass(frozen=True)
class WriteAll:
    """Has every 16-bit value of a graph written to memory."""

    name = "write_all"
    exact = True
    fate = ""

    def apply(self, gm: GraphModule) -> int:
        nodes = [node for graph in graphs(gm) for node in graph.graph.nodes if is_low(node)]
        for node in nodes:
            node.meta[lowering.WRITTEN] = True
        return len(nodes)


def is_low(node: Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, Tensor) and value.dtype in (LOW, HALF)


def outcomes(run: Run, inputs: Sequence[Tensor], dtype: torch.dtype) -> list[list[Tensor | None]]:
    """Of each chain the result, and the gradients of small whole numbers times it."""
    given, draw = [each.clone().requires_grad_() for each in inputs], torch.Generator().manual_seed(0)
    results = run(torch.empty(1, dtype=dtype), *given)
    incoming = [torch.randint(-4, 5, result.shape, generator=draw).to(result.dtype) for result in results]
    gradients = torch.autograd.grad(results, given, incoming, allow_unused=True)
    return [[result.detach(), *gradients[INPUTS * i : INPUTS * (i + 1)]] for i, result in enumerate(results)]


def is_further(ours: Sequence[Any], theirs: Sequence[Any], exact: Sequence[Any], unit: float) -> bool:
    """Whether any of our values is further from the exact ones than theirs by more than a unit in the last place."""
    for a, b, e in zip(ours, theirs, exact, strict=True):
        if e is not None:
            finite = b.isfinite() & e.isfinite()
            mine, eagers = ((each - e)[finite].norm() / e[finite].norm().clamp_min(1e-30) for each in (a, b))
            if not mine <= eagers + unit:
                return True
    return False


def drawn_rows(dtype, monkeypatch):
    """Of each chain its seed and outcomes: fused, with every 16-bit value in memory, eager autocast's, float64's."""
    monkeypatch.setattr(inductor, "cache_key", lambda *_: str(uuid.uuid4()))  # nothing comes from caches
    seeds = [random.getrandbits(32) for _ in range(CHAINS)]
    chains = [Chain.drawn(seed) for seed in seeds]
    inputs = [each for chain, seed in zip(chains, seeds, strict=True) for each in chain.inputs(seed)]
    run, options = together(chains), {"dtype": dtype, "lower": "inductor", "products": "torch", "range_guards": False}
    fused = outcomes(amp(run, **options)[0], inputs, dtype)
    after = pipeline.after
    monkeypatch.setattr(pipeline, "after", lambda *args: (*after(*args), WriteAll()))
    torch._dynamo.reset()
    written = outcomes(amp(run, **options, **ALONE)[0], inputs, dtype)
    eagers = outcomes(lambda *args: eager(run, *args, dtype=dtype), inputs, dtype)
    exact = outcomes(run, [each.to(dtype).double() for each in inputs], torch.float64)
    return list(zip(seeds, chains, fused, written, eagers, exact, strict=True))


ROUNDS = pytest.mark.skipif(dispatcher.TORCH < (2, 13), reason="Inductor 2.11 rounds only on CUDA, whatever it is told")


@ROUNDS
@pytest.mark.ci
@pytest.mark.parametrize("dtype", [LOW, HALF])
def test_fusing_changes_no_bit(dtype, monkeypatch):
    rows = drawn_rows(dtype, monkeypatch)
    assert not [f"{seed} {chain}" for seed, chain, a, b, *_ in rows if not same_bits(a, b)]


@ROUNDS
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [LOW, HALF])
def test_few_are_further_from_float64_than_eagers(dtype, monkeypatch):
    rows = drawn_rows(dtype, monkeypatch)
    further = [f"{seed} {chain}" for seed, chain, a, _, b, e in rows if is_further(a, b, e, torch.finfo(dtype).eps)]
    assert len(further) <= CHAINS // 10, "some kernels of Inductor's round otherwise than eager's"


PROGRAMS = 10
"""Programs in one graph: each then compiles in a second or two."""


def with_keywords(seed: int) -> Chain:
    return Chain.drawn(seed, KEYWORDS, ends="y")


def in_place(seed: int) -> Chain:
    return Chain.drawn(seed, IN_PLACE, first=STARTS, ends="y y@m y*C y+b")


def runs(chain: Chain, inputs: list[Tensor]) -> bool:
    """Whether eager mode takes it."""
    try:
        together([chain])(torch.empty(1), *inputs)
    except RuntimeError:  # memory that is read and written by one op
        return False
    return True


def distance(found: Tensor, exact: Tensor, where: Tensor) -> float:
    return float((found.double() - exact)[where].norm() / (exact[where].norm() + 1e-30))


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:`torch._prims_common.check`:FutureWarning")  # of Inductor's own lowering
@pytest.mark.parametrize(
    ("drawn", "dtype", "products"),
    [
        (with_keywords, LOW, "auto"),
        (with_keywords, HALF, "torch"),
        (in_place, LOW, "auto"),
        (in_place, LOW, "float32"),
    ],
)
def test_none_is_further_than_three_times_eagers(
    drawn: Callable[[int], Chain], dtype: torch.dtype, products: str
) -> None:
    chains, inputs = [], []
    while len(chains) < PROGRAMS:
        seed = random.getrandbits(32)
        given = (chain := drawn(seed)).inputs(seed)
        if runs(chain, given):
            chains.append(chain)
            inputs += given
    run, low = together(chains), torch.empty(1, dtype=dtype)
    with torch.no_grad():
        exact = run(low.double(), *(each.to(dtype).double() for each in inputs))
        theirs = eager(run, low, *inputs, dtype=dtype)
        ours = amp(run, dtype=dtype, lower="inductor", products=products, range_guards=False)[0](low, *inputs)
    for chain, mine, eagers, truth in zip(chains, ours, theirs, exact, strict=True):
        finite = eagers.isfinite() & truth.isfinite()
        assert mine.isfinite()[finite].all(), chain
        errors = [distance(each, truth, finite) for each in (mine, eagers)]
        assert errors[0] <= 3 * errors[1] + 1e-6, (str(chain), errors)
