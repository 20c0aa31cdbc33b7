"""A minimal launch, which tests if Triton works; see `ampcompile.kernels.usable`."""

import torch
import triton
import triton.language as tl


@triton.jit
def amp_probe(out):
    """Write a one, in one program."""
    tl.store(out, 1)


def probe() -> None:
    """Launch a kernel; raise whatever error a broken installation raises."""
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    amp_probe[(1,)](out)
    if out.item() != 1:
        raise RuntimeError("a kernel was launched and wrote nothing")
