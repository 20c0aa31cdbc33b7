"""The losses' rows: who is timed on this machine, what is called the least to move, and why others can't run."""

from benchmarks.kernel_cases import COMPILED, LIGER
from benchmarks.loss_cases import loss_kernels
from benchmarks.peers import AMP


def test_on_the_cpu_inductor_is_timed_and_the_others_say_why_not() -> None:
    alone, layer = loss_kernels("cpu")
    for kernel in (alone, layer):
        assert set(kernel.candidates) == {COMPILED} and set(kernel.unable) == {AMP, LIGER}
        assert all("GPU" in why for why in kernel.unable.values())
        kernel.candidates[COMPILED]()
    assert alone.bytes == 3 * 2 * 256 * 1009
    assert layer.flops == 3 * 2 * 256 * 64 * 1009
