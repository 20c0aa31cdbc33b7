"""Batches are passages of real source text, and what follows them."""

import torch

from examples import stdlib_text


def test_targets_are_the_next_bytes() -> None:
    train, validation = stdlib_text.read(limit=300_000)
    assert train.dtype == validation.dtype == torch.uint8
    assert b"import " in train.numpy().tobytes() and len(validation) > 0
    tokens, targets = stdlib_text.batch(train, 5, 16, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (5, 16) and tokens.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    passage = bytes([*tokens[0].tolist(), int(targets[0, -1])])
    assert passage in train.numpy().tobytes()
