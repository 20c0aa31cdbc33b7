"""Weights cast by a table of addresses are those that torch casts, and none is read where it doesn't lie any more."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampcompile.kernels import cast_table
from ampcompile.kernels.cast_table import CastTable
from ampcompile.torch_private import storages
from tests.compiling import same_bits

pytestmark = pytest.mark.skipif(not cast_table.available(), reason="no C++ compiler works here")
LOW = torch.bfloat16, torch.float16
SPECIAL = torch.tensor([torch.nan, -0.0, torch.inf, -torch.inf, 1e-8, 65520.0, 3.4e38, 1e-40])


def weights_of() -> list[Tensor]:
    """Odd sizes and layouts, one of several chunks, one empty."""
    return [torch.randn(70, 501), torch.randn(3, 5).t(), SPECIAL.repeat(3), torch.empty(0), torch.randn(4, 3, 2, 2)]


def table_of(copies: list[Tensor], weights: list[Tensor], dtype: torch.dtype) -> CastTable:
    objects, begins = list(map(storages.tensor_address, weights)), [weight.data_ptr() for weight in weights]
    return CastTable(copies, objects, begins, [dtype] * len(copies))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", LOW)
def test_the_chosen_are_cast_and_no_others(dtype: torch.dtype, wide: bool) -> None:
    weights = weights_of()
    copies = [torch.full_like(weight, 7, dtype=torch.float32 if wide else dtype) for weight in weights]
    versions = [copy._version for copy in copies]
    table = table_of(copies, weights, dtype)
    for chosen in ([True] * 5, [False, True, False, True, True]):
        for weight in weights:
            weight.mul_(-1)
        before = [copy.clone() for copy in copies]
        assert table.cast(copies, chosen)
        for copy, weight, old, is_chosen in zip(copies, weights, before, chosen, strict=True):
            assert same_bits(copy, weight.to(dtype).to(copy.dtype) if is_chosen else old)
    assert [copy._version - version for copy, version in zip(copies, versions, strict=True)] == [1, 2, 1, 2, 2]


GONE: dict[str, Callable[[list[Tensor]], object]] = {
    "other memory": lambda weights: setattr(weights[0], "data", torch.randn(70, 501)),
    "freed": lambda weights: weights.pop(0),
    "memory that is given out no more": lambda weights: storages.discard_memory(weights[0], "gone"),
}


@pytest.mark.parametrize("gone", GONE)
def test_nothing_is_cast_if_a_weight_is_elsewhere(gone: str) -> None:
    weights = weights_of()
    copies = [torch.full_like(weight, 7, dtype=torch.bfloat16) for weight in weights]
    handles = [storages.TensorHandle(weight) for weight in weights]
    table = table_of(copies, weights, torch.bfloat16)
    GONE[gone](weights)
    assert not table.cast(copies, [True] * 5) and all((copy == 7).all() for copy in copies) and handles
    assert table.cast(copies, [False] + [True] * 4)
