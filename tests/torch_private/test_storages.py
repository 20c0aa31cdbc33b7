"""What tells of a tensor's memory: keys, use counts, version counters, aliases that follow no data."""

import torch
from torch import nn

from ampcompile.torch_private import storages


def test_parameters_that_fsdp_gathers_are_known() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert not storages.is_managed_by_fsdp(weight)
    weight._fsdp_flattened = True
    assert storages.is_managed_by_fsdp(weight)
