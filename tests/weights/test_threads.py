"""Copies that one thread reads while another frees or casts them: the reader gets what is whole, old or new."""

import sys
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

from ampcompile.kernels.packed_linear import LinearBlocks, available
from ampcompile.weights import free_copies, invalidate
from tests.threads import running
from tests.weights.bindings import bind

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
    stop, seen = threading.Event(), 0.0

    def write() -> None:
        while not stop.is_set():
            ACTS[act](param)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with running(write):
            try:
                for _ in range(300):
                    with torch.no_grad():  # `param` is written by one operation, so numbers differ only within that
                        before = param.detach().clone()
                    (copy,) = binding.copies([param])
                    numbers = (copy.to_dense() if copy.is_mkldnn else copy).float()
                    assert numbers.min() >= before.bfloat16().float().min() >= seen, "older than what was read before"
                    seen = float(before.bfloat16().float().min())
            finally:
                stop.set()
    finally:
        sys.setswitchinterval(interval)
    assert torch.equal(bind([BF16]).copies([param])[0], param.detach().bfloat16())
