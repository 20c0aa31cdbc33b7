"""Random numbers are noticed and put back; writes are told apart by whether anything reads what was there."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompile.compiler.double_backward import only_updates_statistics
from ampcompile.passes.graph import placeholders

aten = torch.ops.aten


def normalised(x, mean, var, training):
    return aten.batch_norm(x, None, None, mean, var, training, 0.1, 1e-5, False)


@pytest.mark.parametrize(
    ("f", "unread"),
    [
        (lambda x, s: normalised(x, s, torch.ones(3), True), True),
        (lambda x, s: normalised(x, s, torch.ones(3), False), False),
        (lambda x, s: (s.add_(1), x * 2)[1], True),
        (lambda x, s: x * s.add_(1), False),
        (lambda x, s: (s.add_(1), x * s)[1], False),
        (lambda x, s: (s.add_(x.mean(0)), x)[1], False),
        (lambda x, s: (x.add_(s), x)[1], False),
    ],
)
def test_what_was_there_counts_if_anything_reads_it(f, unread):
    graph = make_fx(f, pre_dispatch=True)(torch.randn(5, 3), torch.zeros(3))
    assert only_updates_statistics(placeholders(graph)[1]) is unread
