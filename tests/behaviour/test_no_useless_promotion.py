"""Norms, softmax and losses on the fp32 list between low-precision ops: float32 inside their kernel, low outside.

The CPU's own list has no norm, so the policy puts them there, as the GPU's list does. What Inductor generates is
searched for kernels that do nothing but cast.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code

from tests.compiling import LOW, compiled, gradients
from tests.models import Net, weight

pytestmark = pytest.mark.filterwarnings(
    "ignore:dynamo_pgo force disabled", "ignore:Mismatch dtype between input and weight"
)
OPS = {
    "rms_norm": lambda h, w: F.rms_norm(h, (32,), w),
    "layer_norm": lambda h, w: F.layer_norm(h, (32,), w),
    "softmax": lambda h, w: h.softmax(-1),
}
LOSS = "cross_entropy"  # on the CPU's own fp32 list


def model_with(op: str) -> nn.Module:
    """The op between two linear layers, with its weight in float32, or a loss of what a linear layer gives."""
    first, last = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
    if op == LOSS:
        return Net(lambda m, x: F.cross_entropy(m.first(x), torch.arange(len(x))), first=first)
    return Net(lambda m, x: m.last(OPS[op](m.first(x), m.weight)), first=first, last=last, weight=weight(32))


def casting_kernels(op: str, train: bool) -> int:
    """Kernels of a call, and of its backward, that only cast."""
    torch._dynamo.reset()
    model, x = model_with(op), torch.randn(16, 32).to(LOW)
    run, _ = compiled(model, lower="inductor", policy="" if op == LOSS else f"op {op}=fp32")

    def call() -> None:
        with torch.set_grad_enabled(train):
            if train:
                gradients(model, lambda m: run(x).float().sum())
            else:
                run(x)

    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(call)
    called = [name for code in codes for name in re.findall(r"^\s+(\w*fused\w*)\(", code.split("def call")[-1], re.M)]
    assert any("_to_copy_" in name or "layer_norm" in name for name in called)
    return sum(re.fullmatch(r"cpp_fused__to_copy_\d+", name) is not None for name in called)


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=pytest.mark.ci if op == "rms_norm" else pytest.mark.slow) for op in (*OPS, LOSS)]
)
def test_no_kernel_only_casts(op: str) -> None:
    assert casting_kernels(op, train=False) == 0
    weights = 1 if op == LOSS else 2  # whose gradients are widened, in one kernel or two
    assert casting_kernels(op, train=True) <= weights
