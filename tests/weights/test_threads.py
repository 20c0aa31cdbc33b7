"""Copies that one thread reads while another frees or casts them: the reader gets what is whole, old or new."""

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ampcompile.kernels.packed_linear import LinearBlocks, available
from ampcompile.weights import copies as weights_copies
from ampcompile.weights.copy_set import CopySet
from ampcompile.weights.store import free_copies, invalidate
from tests.threads import running
from tests.weights.bindings import bind

BF16 = torch.bfloat16
ACTS: dict[str, Callable[[nn.Parameter], object]] = {
    "given other data": lambda param: setattr(param, "data", param.data.clone()),
    "freed": free_copies,
    "announced": invalidate,
}


def before_reading(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Have another thread's act come between the look that finds the next copies fresh and their being read."""
    forms, acts = CopySet.forms, [act]

    def late(known: CopySet) -> list[Tensor]:
        if acts:
            acts.pop()()
        return forms(known)

    monkeypatch.setattr(CopySet, "forms", late)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("act", ACTS)
def test_freed_between_two_looks(act: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if packed and not available(BF16):
        pytest.skip("this CPU's oneDNN has no bfloat16 products")
    param, binding = nn.Parameter(torch.randn(64, 64)), bind([BF16], packed=[LinearBlocks() if packed else None])
    for _ in range(4):
        binding.copies([param])
    before_reading(monkeypatch, lambda: ACTS[act](param))
    (copy,) = binding.copies([param])
    assert torch.equal(copy.to_dense() if copy.is_mkldnn else copy, param.detach().to(BF16))


def test_half_cast_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    param, x = nn.Parameter(torch.randn(40, 8)), torch.randn(5, 8, dtype=BF16, requires_grad=True)
    reader, other = bind([BF16]), bind([BF16])
    waits = F.linear(x, *reader.copies([param]))  # so that the next cast takes a fresh buffer
    other.copies([param])
    cast, written, begun, returned = weights_copies.cast_many_, *(threading.Event() for _ in range(3))

    def slow_cast(*args: object) -> None:
        begun.set()
        returned.wait(0.3)  # or until whoever reads them waits for this cast
        cast(*args)

    def casts() -> None:
        assert written.wait(60)
        other.copies([param])

    def write() -> None:
        with torch.no_grad():
            param.add_(1)
        written.set()
        assert begun.wait(60)

    reader.copies([param])
    monkeypatch.setattr(weights_copies, "cast_many_", slow_cast)
    before_reading(monkeypatch, write)
    with running(casts):
        try:
            read = reader.copies([param])[0].clone()
        finally:
            returned.set()
    assert torch.equal(read, param.detach().to(BF16)) and waits.requires_grad
