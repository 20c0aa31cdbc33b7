"""A small GPT learns in fp8 as it does in bfloat16."""

from typing import Any

import pytest
import torch

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
