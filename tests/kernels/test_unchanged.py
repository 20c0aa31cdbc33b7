"""What C++ reads of torch's objects is what Python reads, and every kind of change is seen."""

import ctypes
from collections.abc import Callable

import pytest
import torch

from ampcompile.kernels import unchanged
from ampcompile.kernels.unchanged import Unchanged
from ampcompile.torch_private import storages

pytestmark = pytest.mark.skipif(not unchanged.available(), reason="no C++ compiler works here")


class Noted:
    """A slice of a tensor, an empty tensor, and their state; 20 words after the slice's beginning are sampled."""

    def __init__(self) -> None:
        self.base = torch.arange(64.0)
        self.tensors = [self.base[4:60], torch.empty(0, 3)]
        self.handles = [storages.TensorHandle(tensor) for tensor in self.tensors]
        storage = storages.storage_key(self.base)
        self.at = self.tensors[0].data_ptr()
        self.impls = [storages.tensor_address(tensor) for tensor in self.tensors]
        self.unchanged = Unchanged(
            tensors=self.impls,
            counters=self.impls,
            versions=[tensor._version for tensor in self.tensors],
            weights=self.impls,
            addresses=[tensor.data_ptr() for tensor in self.tensors],
            storages=[storage],
            users=[storages.storage_users(storage)],
            runs=[self.at],
            words=[self.at + 4 * i for i in range(16, 20)],
            sampled=ctypes.string_at(self.at, 80),
            kept=self.handles,
        )

    def write(self, word: int) -> None:
        """Write where no version counts it."""
        ctypes.memset(self.at + 4 * word, 1, 1)


CHANGES: dict[str, Callable[[Noted], object]] = {
    "a version": lambda noted: noted.base.add_(0),
    "an address": lambda noted: setattr(noted.tensors[0], "data", torch.arange(4.0, 60.0)),
    "a user more": lambda noted: setattr(noted, "view", noted.base.view(8, 8)),
    "a tensor that is gone": lambda noted: noted.tensors.pop(),
    "memory that is given out no more": lambda noted: storages.discard_memory(noted.tensors[0], "gone"),
    "the first word of a run": lambda noted: noted.write(0),
    "the last word of a run": lambda noted: noted.write(15),
    "the last word": lambda noted: noted.write(19),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    noted = Noted()
    assert noted.unchanged(noted.impls) and noted.unchanged(noted.impls)
    CHANGES[change](noted)
    assert not noted.unchanged(noted.impls)


def test_what_is_not_sampled_is_not_read_and_another_tensor_is_no_weight() -> None:
    noted = Noted()
    noted.write(20)
    assert noted.unchanged(noted.impls) and not noted.unchanged(noted.impls[:1])


def test_a_tensor_without_versions_is_never_unchanged() -> None:
    with torch.inference_mode():
        inference = torch.zeros(3)
    counters = [storages.tensor_address(inference)]
    assert not Unchanged([], counters, [0], [], [], [], [], [], [], b"", inference)([])


def test_weights_that_were_forgotten_while_their_state_was_noted_are_not_unchanged() -> None:
    """Another thread empties the list of weights in between: the first rows are shorter then."""
    noted = Noted()
    state = Unchanged([], [], [0, 0], [], [noted.at], [], [], [], [], b"", None)
    assert not state(noted.impls) and noted.unchanged(noted.impls)
