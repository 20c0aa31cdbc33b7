"""Run by test_families.py: what torch makes of the fused ops on a GPU, seen on fake tensors."""

import re

import torch
import triton
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses import FakeTensorMode
from triton.backends.compiler import GPUTarget

from ampcompile.kernels.cross_entropy import Kind, coefficients, cross_entropy, gradient
from ampcompile.kernels.group_norm import group_norm, group_norm_backward
from ampcompile.kernels.norm import norm, norm_backward

LOW = torch.bfloat16


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def ops(wide, low, weight, channel, rows):
    return (
        *norm(wide, low, weight, weight, 48, 1e-5, True, False, False, LOW, 2),
        *norm_backward([low, wide], wide, wide, weight, rows, rows, 48, False, True, True, LOW),
        *group_norm(wide, low, channel, channel, 5, 1e-5, True, False, False, LOW, 2),
        *group_norm_backward([low, wide], wide, wide, channel, channel, rows, rows, 5, True, False, True, True, LOW),
    )


def loss_and_gradient(logits, target):
    loss, lse = cross_entropy(logits, target)
    rows = coefficients(loss, lse, target, None, 50257, Kind("mean", -100, 0.0, 0.0))
    return loss, gradient(logits, lse, target, None, rows)


def traced(f, *given):
    code = aot_export_joint_simple(f, given, trace_joint=False).code
    print(code)
    return code


def check_norms():
    with FakeTensorMode():
        wide, rows = torch.empty(3, 5, 48, device="cuda"), torch.empty(15, device="cuda")
        weight, channel = torch.empty(48, device="cuda"), torch.empty(5, device="cuda")
        code = traced(ops, wide, wide.to(LOW), weight, channel, rows)
    # Each is one launch that writes its results and nothing else; gradients of weights are summed after it.
    assert re.findall(r"tensors_to_clone = \[([^]]*)\]", code) == [
        "'h', 'low', 'means', 'rstds'",
        "'first', 'second', 'to_weight', 'to_bias'",
        "'h', 'low', 'means', 'rstds'",
        "'first', 'second', 'to_weight', 'to_bias'",
    ]
    assert code.count("aten.sum.dim_IntList(") == 4 and code.count("ampcompile.copied") == 2
    assert "_to_copy" not in code and "aten.mul" not in code


def check_cross_entropy():
    """Forward is one kernel, backward plain torch."""
    with FakeTensorMode():
        logits = torch.empty(6, 50257, dtype=LOW, device="cuda")
        code = traced(loss_and_gradient, logits, torch.empty(6, dtype=torch.long, device="cuda"))
    assert code.count("triton_kernel_wrapper_functional(") == 1 and "tensors_to_clone = ['lse']" in code
    assert code.count("aten.exp.") == 1 and "logsumexp" not in code


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    check_norms()
    check_cross_entropy()
