"""What docs/memory.md says that a step holds."""

import gc
import re
from typing import Any

import pytest
import torch

import ampcompile
from benchmarks.models import GPT, GPT_23M
from tests.test_layout import ROOT

HOWS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32 parameters": (torch.float32, {}),
    'with `states="bfloat16"`': (torch.float32, {"states": "bfloat16"}),
    'with `states="8bit"`': (torch.float32, {"states": "8bit"}),
    'bfloat16 parameters, `masters="remainder"`': (torch.bfloat16, {"masters": "remainder"}),
    'the same, `states="8bit"`': (torch.bfloat16, {"masters": "remainder", "states": "8bit"}),
    '`masters="remainder8"`, `states="8bit"`': (torch.bfloat16, {"masters": "remainder8", "states": "8bit"}),
    '`masters="stochastic"`, `states="8bit"`': (torch.bfloat16, {"masters": "stochastic", "states": "8bit"}),
}
"""Rows of the page's table → the parameters' dtype and the optimizer's options."""
PAGE = (ROOT / "docs" / "memory.md").read_text()


def storages() -> dict[int, int]:
    """All memory of tensors that live, by address, in bytes."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    return {storage.data_ptr(): storage.nbytes() for storage in map(torch.Tensor.untyped_storage, tensors)}


@pytest.mark.ci
@pytest.mark.parametrize("row", HOWS)
def test_a_step_holds_the_bytes_that_the_page_says(row: str) -> None:
    before = storages()
    dtype, options = HOWS[row]
    model = GPT(GPT_23M).to(dtype)
    optimizer = ampcompile.optim.AdamW(model.parameters(), **options)
    compiled = torch.compile(model, backend="amp", options={"dtype": torch.bfloat16, "lower": "eager"})
    tokens = torch.randint(8192, (1, 8))
    for _ in range(2):
        optimizer.zero_grad()
        compiled(tokens, tokens).backward()
        optimizer.step()
    _ = [param.grad for param in model.parameters()]  # Python knows of them now
    lives = storages()
    held = sum(size for address, size in lives.items() if address not in before)
    said = re.search(rf"^\| {re.escape(row)} \|.* ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert held / sum(param.numel() for param in model.parameters()) == pytest.approx(float(said[1]), abs=0.1)
