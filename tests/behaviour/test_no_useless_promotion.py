"""Norms, softmax and losses on the fp32 list between low-precision ops: float32 inside their kernel, low outside.

The CPU's own list has no norm, so the policy puts them there, as the GPU's list does. What Inductor generates is
searched for kernels that do nothing but cast.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
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


def between(op: str) -> nn.Module:
    """An op between two linear layers, with its weight in float32."""
    first, last = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
    return Net(lambda m, x: m.last(OPS[op](m.first(x), m.weight)), first=first, last=last, weight=weight(32))


def loss() -> nn.Module:
    """Cross entropy, which is on the CPU's own fp32 list, of what a linear layer gives."""
    return Net(lambda m, x: F.cross_entropy(m.first(x), torch.arange(len(x))), first=nn.Linear(32, 32, bias=False))


def casting_kernels(model: nn.Module, x: Tensor, train: bool, policy: str = "") -> int:
    """Kernels of a call, and of its backward, that only cast."""
    torch._dynamo.reset()
    run, _ = compiled(model, lower="inductor", policy=policy)

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
    "name", [pytest.param(n, marks=pytest.mark.ci if n == "rms_norm" else pytest.mark.slow) for n in OPS]
)
def test_no_kernel_only_casts_around_a_norm(name: str) -> None:
    model, x = between(name), torch.randn(16, 32).to(LOW)
    policy = f"op {name}=fp32"
    assert casting_kernels(model, x, False, policy) == 0
    weights = 2  # gradients of the linear layers, in one kernel or two
    assert casting_kernels(model, x, True, policy) <= weights


@pytest.mark.slow
def test_no_kernel_only_casts_around_a_loss() -> None:
    model, x = loss(), torch.randn(16, 32).to(LOW)
    assert casting_kernels(model, x, False) == 0
    assert casting_kernels(model, x, True) <= 1
