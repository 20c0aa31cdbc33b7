"""Training in fp8: a small GPT learns as in bfloat16, backward keeps bytes, and reads the weights of its forward."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampcompile.kernels import fp8
from benchmarks.models import GPT, GPTConfig
from examples import stdlib_text

SMALL = GPTConfig(layers=2, width=64, heads=4, vocab=256, context=32)


def losses(policy: str, steps: int) -> list[float]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    text, _ = stdlib_text.read()
    random = torch.Generator().manual_seed(0)
    model = GPT(SMALL)
    options: dict[str, Any] = {"policy": policy, "products": "torch"}
    compiled = torch.compile(model, backend="amp", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    found = []
    for _ in range(steps):
        loss = compiled(*stdlib_text.batch(text, 16, SMALL.context, random))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.slow
def test_three_hundred_steps_are_within_one_percent_of_bfloat16() -> None:
    low, quantized = (losses(policy, 300) for policy in ("default", "module blocks=fp8"))
    assert low[0] != quantized[0]
    last = [sum(each[-50:]) / 50 for each in (low, quantized)]
    assert last[0] < 0.6 * low[0]
    assert abs(last[1] / last[0] - 1) < 0.01


class Gated(nn.Module):
    """A gated MLP beside a skip connection, as Llama's."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def saved(model: nn.Module, x: Tensor, policy: str) -> list[Tensor]:
    """The tensors that forward keeps for backward, weights and their copies aside, each memory once."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="amp", options={"policy": policy, "products": "torch"})
    compiled(x).sum().backward()
    kept: dict[int, Tensor] = {}

    def pack(value: Tensor) -> Tensor:
        kept.setdefault(value.untyped_storage().data_ptr(), value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        compiled(x)
    return [value for value in kept.values() if value.shape[:1] == x.shape[:1]]


@pytest.mark.gpu
def test_backward_keeps_inputs_of_products_in_8_bits() -> None:
    model, x = Gated().cuda(), torch.randn(48, 32, device="cuda")
    low, quantized = (saved(model, x, policy) for policy in ("default", "op linear=fp8"))
    eights = [tuple(value.shape) for value in quantized if value.dtype == torch.float8_e4m3fn]
    assert sorted(eights) == [(48, 32), (48, 128)]
    bytes_kept = [sum(value.nbytes for value in each) for each in (low, quantized)]
    assert bytes_kept[0] - bytes_kept[1] == 48 * (32 + 128), "one byte a number instead of two"


@pytest.mark.parametrize("lower", [pytest.param("inductor", marks=pytest.mark.ci), "eager"])
def test_an_update_between_does_not_change_what_backward_reads(lower: str) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16, bias=False)), torch.randn(16, 16, requires_grad=True)
    options: dict[str, Any] = {"policy": "module *=fp8", "products": "torch", "lower": lower}
    compiled = torch.compile(model, backend="amp", options=options)
    for _ in range(3):
        compiled(x).sum().backward()
    result, before = compiled(x), model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.mul_(-3)
    compiled(x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    expected = torch.ones(16, 16) @ before
    assert (gradient - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("recipe", [*fp8.GRADIENTS])
def test_a_second_derivative_is_refused(recipe: str) -> None:
    model, x = nn.Linear(16, 16), torch.randn(16, 16, requires_grad=True)
    options: dict[str, Any] = {"policy": f"module *={recipe}", "products": "torch", "lower": "eager"}
    compiled = torch.compile(model, backend="amp", options=options)
    (gradient,) = torch.autograd.grad(compiled(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="aten::_scaled_mm"):
        gradient.square().sum().backward()
