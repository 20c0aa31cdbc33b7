"""Random chains on the made-up GPU: a fused kernel has the bits of the same ops in a kernel each, gradients too."""

import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ampcompile.compiler import inductor
from ampcompile.passes import pipeline
from tests.behaviour.chains import BINARY, INPUTS, REDUCING, SCALAR, UNARY, Chain, together
from tests.behaviour.test_chains import ALONE, WriteAll
from tests.compiling import same_bits

pytestmark = pytest.mark.emulated
COUNT, GROUPS = 20, 10
SHARES = {UNARY: 8, SCALAR: 6, BINARY: 6, REDUCING: 6}
"""Without products, which are no kernels of Triton's."""
Outcome = list[list[Tensor | None]]


def outcomes(run: Any, inputs: list[Tensor], dtype: torch.dtype) -> Outcome:
    """Of each chain the result, and the gradients of small whole numbers times it."""
    given, draw = [x.clone().requires_grad_() for x in inputs], torch.Generator().manual_seed(0)
    results = run(torch.empty(1, dtype=dtype, device="cuda"), *given)
    incoming = [torch.randint(-4, 5, r.shape, generator=draw).to(r.dtype).cuda() for r in results]
    gradients = torch.autograd.grad(results, given, incoming, allow_unused=True)
    found = [[r.detach(), *gradients[INPUTS * i : INPUTS * (i + 1)]] for i, r in enumerate(results)]
    return [[x if x is None else x.cpu() for x in row] for row in found]


def compiled(run: Callable[..., Any], dtype: torch.dtype, **more: Any) -> Any:
    torch._dynamo.reset()
    options = {"dtype": dtype, "lower": "inductor", "products": "torch", "range_guards": False, **more}
    return torch.compile(run, backend="amp", options=options)


def differing(dtype: torch.dtype, group: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[str]:
    """The chains of a group whose bits differ, fused with these options, from those of one op a kernel."""
    monkeypatch.setattr(inductor, "cache_key", lambda *_: str(uuid.uuid4()))  # nothing comes from caches
    seeds = [1000 * group + i for i in range(COUNT)]
    chains = [Chain.drawn(seed, SHARES) for seed in seeds]
    inputs = [x.cuda() for chain, seed in zip(chains, seeds, strict=True) for x in chain.inputs(seed)]
    run = together(chains)
    fused = outcomes(compiled(run, dtype, **options), inputs, dtype)
    after = pipeline.after
    monkeypatch.setattr(pipeline, "after", lambda *args: (*after(*args), WriteAll()))
    written = outcomes(compiled(run, dtype, **ALONE), inputs, dtype)
    rows = zip(seeds, chains, fused, written, strict=True)
    return [f"{seed} {chain}" for seed, chain, a, b in rows if not same_bits(a, b)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", range(GROUPS))
def test_fusing_changes_no_bit(dtype: torch.dtype, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not differing(dtype, group, monkeypatch)


def test_lost_roundings_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(differing(torch.bfloat16, 0, monkeypatch, numerics="relaxed")) > COUNT // 4
