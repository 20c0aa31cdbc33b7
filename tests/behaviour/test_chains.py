"""Random chains: fusing changes no bit of results or gradients, and none is further from float64 than eager's."""

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
from tests.behaviour.chains import INPUTS, Chain, together
from tests.compiling import HALF, LOW, amp, eager, same_bits

SOME, COUNT = 6, 30
"""Chains in one graph: each takes 5 seconds, and of those that fusing may change `make fuzz` draws others."""
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
            node.meta[lowering.WRITE_TO_MEMORY] = True
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


def drawn_rows(dtype, count, monkeypatch):
    """Of each chain its seed and outcomes: fused, with every 16-bit value in memory, eager autocast's, float64's."""
    monkeypatch.setattr(inductor, "cache_key", lambda *_: str(uuid.uuid4()))  # nothing comes from caches
    seeds = [random.getrandbits(32) for _ in range(count)]
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
    rows = drawn_rows(dtype, SOME, monkeypatch)
    assert not [f"{seed} {chain}" for seed, chain, a, b, *_ in rows if not same_bits(a, b)]


@ROUNDS
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [LOW, HALF])
def test_few_are_further_from_float64_than_eagers(dtype, monkeypatch):
    rows = drawn_rows(dtype, COUNT, monkeypatch)
    further = [f"{seed} {chain}" for seed, chain, a, _, b, e in rows if is_further(a, b, e, torch.finfo(dtype).eps)]
    assert len(further) <= COUNT // 10, "some kernels of Inductor's round otherwise than eager's"
