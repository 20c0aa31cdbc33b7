"""Copies that one thread reads while another writes, frees or casts: readers get what is whole, writers no old one."""

import gc
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ampcompile.kernels.packed_linear import LinearBlocks, available
from ampcompile.torch_private.storages import Living
from ampcompile.weights import free_copies, invalidate
from ampcompile.weights.store import store
from tests.threads import racing
from tests.weights.bindings import bind
from tests.weights.writers import unsampled

BF16 = torch.bfloat16
ACTS: dict[str, Callable[[nn.Parameter], object]] = {
    "given other data": lambda param: setattr(param, "data", param.data.clone()),
    "freed": free_copies,
    "announced": invalidate,
    "written": lambda param: torch.no_grad()(param.add_)(1),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("act", ACTS)
def test_a_reader_gets_numbers_that_were_the_weights(act: str, packed: bool) -> None:
    if packed and not available(BF16):
        pytest.skip("this CPU's oneDNN has no bfloat16 products")
    param, binding = nn.Parameter(torch.zeros(256, 256)), bind([BF16], packed=[LinearBlocks() if packed else None])
    seen = 0.0
    with racing(lambda: ACTS[act](param)):
        for _ in range(300):
            with torch.no_grad():  # `param` is written by one operation, so numbers differ only within that
                before = param.detach().clone()
            (copy,) = binding.copies([param])
            numbers = (copy.to_dense() if copy.is_mkldnn else copy).float()
            assert numbers.min() >= before.bfloat16().float().min() >= seen, "older than what was read before"
            seen = float(before.bfloat16().float().min())
    assert torch.equal(bind([BF16]).copies([param])[0], param.detach().bfloat16())


@pytest.mark.parametrize("writer", ["fused step", ".data", "other data"])
def test_a_thread_that_writes_while_others_call(writer: str) -> None:
    weights, binding = [nn.Parameter(torch.randn(20, 20)) for _ in range(20)], bind([BF16] * 20)
    at, end = unsampled(weights[0]), time.monotonic() + 1
    optimizer = torch.optim.SGD(weights, lr=1.0, fused=True)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
        weight.grad[at] = 1.0

    def train() -> None:
        x = torch.ones(1, 20, dtype=BF16, requires_grad=True)
        sum(F.linear(x, copied).sum() for copied in binding.copies(weights)).backward()

    with racing(train, threads=2):
        while time.monotonic() < end:
            if writer == "fused step":
                optimizer.step()
            for weight in weights if writer != "fused step" else ():
                if writer == "other data":
                    weight.data = weight.data.clone()
                weight.data[at] += 1
            for copied, weight in zip(binding.copies(weights), weights, strict=True):
                assert copied[at] == weight.detach()[at].to(BF16), "stale"


def test_a_set_that_grows_and_shrinks_while_it_is_walked() -> None:
    kept = [bind([BF16]) for _ in range(4)]
    bindings = Living(kept)
    for binding in bindings:
        bindings.add(bind([BF16]))  # freed at once
        kept.append(bind([BF16]))
        bindings.add(kept[-1])
        kept.remove(binding)
    del binding
    assert set(bindings) == set(kept)


def test_storages_with_copies_are_known_while_copies_come_and_go() -> None:
    """Graphs of other threads, whose copies of the same weight the collector frees."""
    gc.collect()
    others = set(store.keys) - {copy.key for copy in store.copies.values()}  # whose places newer weights have by now
    param = nn.Parameter(torch.randn(8, 8))

    def come_and_go() -> None:
        for dtype in (BF16, torch.float16):
            binding = bind([dtype] * 2)
            binding.copies([nn.Parameter(torch.randn(8, 8)), param])
            binding.cycle = binding

    with racing(come_and_go, threads=2):
        for _ in range(50):
            store.read_whole()
            invalidate(param)
            gc.collect(0)
    kept = bind([BF16])
    kept.copies([param])
    gc.collect()
    assert set(store.keys) - others == {copy.key for copy in store.copies.values()}
