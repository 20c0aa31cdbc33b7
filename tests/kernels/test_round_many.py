"""Many tensors rounded at once equal one rounded at a time, in any layout, and raise versions."""

import pytest
import torch

from ampcompile.kernels import unchanged
from ampcompile.kernels.round_many import round_many_, round_many_reference_
from tests.compiling import same_bits

from .test_cast_many import SOURCES, TARGETS, poisoned, weights_of


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("write", [round_many_, round_many_reference_])
def test_equals_one_rounded_at_a_time(write, source, target):
    weights = weights_of(source, "cpu")
    copies = poisoned(weights, torch.float32)
    versions = [copy._version for copy in copies]
    write(copies, weights, [target] * len(copies))
    for copy, weight, version in zip(copies, weights, versions, strict=True):
        assert same_bits(copy, weight.to(target).float()) and copy.stride() == weight.stride()
        assert copy._version > version


@pytest.mark.parametrize("built", [True, False])
def test_dtypes_may_be_mixed_and_a_compiler_missing(monkeypatch, built):
    if not built:
        monkeypatch.setattr(unchanged, "available", lambda: False)
    weights = [torch.tensor([torch.nan, -0.0, torch.inf, 1e-8, 65520.0, 3.3]) for _ in TARGETS]
    copies = poisoned(weights, torch.float32)
    round_many_(copies, weights, TARGETS)
    assert all(same_bits(c, w.to(d).float()) for c, w, d in zip(copies, weights, TARGETS, strict=True))


def test_nothing_is_fine():
    round_many_([], [], [])
