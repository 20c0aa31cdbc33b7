"""What tells of a tensor's memory: keys, use counts, version counters, aliases that follow no data."""

import pytest
import torch
from torch import nn

from ampcompile.torch_private import storages


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_tensor_owns_its_memory_alone_or_with_a_base_that_nobody_holds(mode: type) -> None:
    weight = nn.Parameter(torch.randn(3, 2))
    with mode():
        computed, base = weight * 2, weight * 2
        assert storages.owns_memory(computed) and storages.is_sole_holder(computed)
        if mode is torch.no_grad:
            assert storages.owns_memory((weight * 2)[0]), "its base is in no variable"
        for view in (weight[0], weight.detach()[0], base[0], weight.detach()):
            assert not storages.is_sole_holder(view) and not storages.owns_memory(view)
        saved = (weight * 2).exp()  # for its backward
        assert storages.owns_memory(saved)
    assert not storages.owns_memory(torch.eye(2).to_sparse())
    torch.vmap(lambda row: pytest.fail("it has no memory of its own") if storages.owns_memory(row * 2) else row)(weight)


def test_parameters_that_fsdp_gathers_are_known() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert not storages.is_managed_by_fsdp(weight)
    weight._fsdp_flattened = True
    assert storages.is_managed_by_fsdp(weight)
