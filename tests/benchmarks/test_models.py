"""The GPT is causal, has the size it claims, and gives the loss it says."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.models import GPT, GPT_1_3B, GPT_13M, GPT_23M, GPT_124M, GPTConfig

TINY = GPTConfig(layers=2, width=16, heads=2, vocab=11, context=7)


@pytest.mark.parametrize("config, millions", [(GPT_13M, 13), (GPT_23M, 23), (GPT_124M, 124), (GPT_1_3B, 1300)])
def test_sizes(config: GPTConfig, millions: int) -> None:
    with torch.device("meta"):
        model = GPT(config)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1e6 * millions, rel=0.03)


def test_what_comes_later_changes_nothing() -> None:
    model, tokens = GPT(TINY), torch.randint(11, (3, 7))
    changed = tokens.clone()
    changed[:, 4] = (tokens[:, 4] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(-1).all()


@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients(tied: bool) -> None:
    model = GPT(GPTConfig(layers=1, width=16, heads=2, vocab=11, context=7, tied=tied))
    assert (model.head.weight is model.tokens.weight) == tied
    tokens, targets = torch.randint(11, (2, 3, 7))
    loss = model(tokens, targets)
    torch.testing.assert_close(loss, F.cross_entropy(model(tokens).transpose(1, 2), targets))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
