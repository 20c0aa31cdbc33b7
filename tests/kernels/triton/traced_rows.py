"""Run by test_families.py: what torch makes of a fused loss on a GPU, seen on fake tensors."""

import torch
import triton
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses import FakeTensorMode
from triton.backends.compiler import GPUTarget

from ampcompile.kernels.cross_entropy import Kind, coefficients, cross_entropy, gradient


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def loss_and_gradient(logits, target):
    loss, lse = cross_entropy(logits, target)
    rows = coefficients(loss, lse, target, None, 50257, Kind("mean", -100, 0.0, 0.0))
    return loss, gradient(logits, lse, target, None, rows)


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    with FakeTensorMode():
        given = (
            torch.empty(6, 50257, dtype=torch.bfloat16, device="cuda"),
            torch.empty(6, dtype=torch.long, device="cuda"),
        )
        code = aot_export_joint_simple(loss_and_gradient, given, trace_joint=False).code
    print(code)
    # Forward is one kernel that writes its results and nothing else, backward plain torch.
    assert code.count("triton_kernel_wrapper_functional(") == 1 and "tensors_to_clone = ['lse']" in code
    assert code.count("aten.exp.") == 1 and "logsumexp" not in code
