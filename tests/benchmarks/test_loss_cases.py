"""The losses' rows: who is timed on this machine, what is called the least to move, and why others can't run."""

import torch

from benchmarks.kernel_cases import COMPILED, LIGER
from benchmarks.loss_cases import loss_kernels
from benchmarks.peers import AMP


def test_on_the_cpu_ours_runs_too_and_liger_says_why_not() -> None:
    alone, layer = loss_kernels("cpu")
    for kernel in (alone, layer):
        assert set(kernel.candidates) == {COMPILED, AMP} and set(kernel.unable) == {LIGER}
        assert "GPU" in kernel.unable[LIGER]
        expected, found = (kernel.candidates[name]() for name in (COMPILED, AMP))
        torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-3)
    assert alone.bytes == 3 * 2 * 256 * 1009
    assert layer.flops == 3 * 2 * 256 * 64 * 1009
