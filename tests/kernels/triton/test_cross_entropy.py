"""Kernels on rows of logits: their numbers in Triton's interpreter, their machine code, what a trace for CUDA holds."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from tests.kernels.triton.test_step import python

HERE = Path(__file__).parent


def test_numbers_in_the_interpreter() -> None:
    python("-m", "pytest", "-p", "no:cacheprovider", str(HERE / "interpreted_cross_entropy.py"), TRITON_INTERPRET="1")


@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_machine_code(capability: str) -> None:
    python("-m", "tests.kernels.triton.compiled_cross_entropy", capability, TRITON_INTERPRET="0")


TRACE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses import FakeTensorMode
from ampcompile.kernels.cross_entropy import Kind, coefficients, cross_entropy, gradient

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Driver())
with FakeTensorMode():
    logits = torch.empty(6, 50257, dtype=torch.bfloat16, device="cuda")
    target = torch.empty(6, dtype=torch.long, device="cuda")
    def both(logits, target):
        loss, lse = cross_entropy(logits, target)
        rows = coefficients(loss, lse, target, None, 50257, Kind("mean", -100, 0.0, 0.0))
        return loss, gradient(logits, lse, target, None, rows)
    code = aot_export_joint_simple(both, (logits, target), trace_joint=False).code
print(code)
assert code.count("triton_kernel_wrapper_functional(") == 1 and "tensors_to_clone = ['lse']" in code
assert code.count("aten.exp.") == 1 and "logsumexp" not in code
"""


def test_traced_for_cuda_forward_is_one_kernel_and_backward_plain_torch() -> None:
    result = subprocess.run([sys.executable, "-c", TRACE], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
