"""What tells of a tensor's memory: keys, use counts, version counters, aliases that follow no data."""

import pytest
import torch
from torch import nn

from ampcompile.torch_private import storages


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x[1:],
        lambda x: x[1:][:2],
        lambda x: x.t(),
        lambda x: x.view(torch.int32),
        lambda x: x.clone(),
        lambda x: x.view(-1),
    ],
)
def test_another_view_is_not_the_same_place(other) -> None:
    x = torch.randn(3, 3)
    assert storages.same_place(x, x.detach()) and not storages.same_place(x, other(x))


def test_parameters_that_fsdp_gathers_are_known() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert not storages.is_managed_by_fsdp(weight)
    weight._fsdp_flattened = True
    assert storages.is_managed_by_fsdp(weight)


def test_what_an_array_may_hold_is_a_plain_tensor_whose_storage_can_t_grow() -> None:
    weight = nn.Parameter(torch.randn(3))
    kept, viewed = weight.detach(), weight.data
    view = viewed.view(3)
    assert not storages.may_be_in_arrays(kept), "there was none"
    array = kept.numpy()
    assert (
        type(array.base) is torch.Tensor and storages.may_be_in_arrays(array.base) and storages.may_be_in_arrays(kept)
    )
    assert not storages.may_be_in_arrays(weight) and not storages.may_be_in_arrays(viewed) and view._base is viewed


def test_a_tensor_without_memory_keeps_all_but_its_numbers() -> None:
    weight = nn.Parameter(torch.randn(4, 6).t())
    memory = storages.StorageWeakRef(weight.untyped_storage())
    storages.discard_memory(weight, "found a reader")
    assert memory.expired() and not storages.has_memory(weight) and storages.place(weight) is None
    assert (type(weight), weight.shape, weight.stride(), weight.requires_grad) == (nn.Parameter, (6, 4), (1, 6), True)
    for use in (lambda: weight + 1, lambda: weight[0], lambda: weight.detach().zero_(), weight.data_ptr):
        with pytest.raises(RuntimeError, match="found a reader"):
            use()
    storages.write_data(weight, torch.ones(6, 4))
    assert storages.has_memory(weight) and weight.sum() == 24 and weight[0].sum() == 4
