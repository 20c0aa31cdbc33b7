"""A renewal casts what was written and nothing else, and nothing at all once anything else has changed."""

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampcompile.kernels import unchanged
from ampcompile.kernels.renewal import CopyPlace, CopyRecord, MemoryRecord, RenewalTable, SharerRecord
from ampcompile.kernels.unchanged import Unchanged
from ampcompile.torch_private import storages
from tests.compiling import same_bits

pytestmark = pytest.mark.skipif(not unchanged.available(), reason="no C++ compiler works here")
LOW = torch.bfloat16, torch.float16
SPECIAL = torch.tensor([torch.nan, -0.0, torch.inf, -torch.inf, 1e-8, 65520.0, 3.4e38, 1e-40])


class Case:
    """Weights of odd sizes and layouts, one of several chunks, one empty; each with a copy, and its first word sampled.

    All copies are stale at first.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, wide: bool = False) -> None:
        sizes = [
            torch.randn(70, 501),
            torch.randn(3, 5).t(),
            SPECIAL.repeat(3),
            torch.empty(0),
            torch.randn(4, 3, 2, 2),
        ]
        self.weights, self.dtype = sizes, dtype
        self.copies = [torch.full_like(weight, 7, dtype=torch.float32 if wide else dtype) for weight in sizes]
        self.handles = [storages.TensorHandle(weight) for weight in sizes]
        self.impls = list(map(storages.tensor_address, sizes))
        self.memories, self.records = [MemoryRecord(mark=1) for _ in sizes], [CopyRecord(buffer=5) for _ in sizes]
        self.sharers = [SharerRecord(seen=weight._version) for weight in sizes]
        places, words = [], []
        for weight, copy, record, memory in zip(sizes, self.copies, self.records, self.memories, strict=True):
            word = ctypes.create_string_buffer(4 if weight.numel() else 0)
            record.words_address, record.kept = ctypes.addressof(word), word
            words += [weight.data_ptr()] * bool(weight.numel())
            impl = storages.tensor_address(weight)
            places.append(CopyPlace(record, memory, impl, weight.data_ptr(), copy, dtype, len(word)))
        self.state = Unchanged(
            tensors=self.impls,
            counters=self.impls,
            versions=[weight._version for weight in sizes],
            weights=self.impls,
            addresses=[weight.data_ptr() for weight in sizes],
            storages=[],
            users=[],
            runs=[],
            words=words,
            sampled=b"".join(ctypes.string_at(at, 4) for at in words),
            kept=self.handles,
        )
        self.table = RenewalTable(self.state, self.sharers, self.memories, places)

    def right(self, copy: Tensor, weight: Tensor) -> bool:
        return same_bits(copy, weight.to(self.dtype).to(copy.dtype))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", LOW)
def test_what_was_written_is_cast_and_no_other(dtype: torch.dtype, wide: bool) -> None:
    case = Case(dtype, wide)
    versions = [copy._version for copy in case.copies]
    for written in ([0, 1, 2, 3, 4], [1, 3, 4], []):
        for i in written:
            case.weights[i].mul_(-1)
        before = [copy.clone() for copy in case.copies]
        assert case.table.find_stale() == len(written)
        assert not written or (not case.state(case.impls) and case.table.cast()), "noted before it was cast"
        assert case.state(case.impls)
        for i, (copy, weight) in enumerate(zip(case.copies, case.weights, strict=True)):
            assert case.right(copy, weight) if i in written else same_bits(copy, before[i])
    assert [copy._version - version for copy, version in zip(case.copies, versions, strict=True)] == [1, 2, 1, 2, 2]
    assert len({memory.mark for memory in case.memories}) == 2, "a mark for all writes that a look finds"


@pytest.mark.parametrize("write_again", ["while it is cast", "after it was cast"])
def test_a_later_write_is_found_by_the_next_look(write_again: str) -> None:
    case = Case()
    assert case.table.find_stale() == 5
    if write_again == "while it is cast":
        case.memories[0].mark = 2  # by another thread that detects it
    assert case.table.cast()
    if write_again == "after it was cast":
        case.weights[0].add_(1)
    assert case.table.find_stale() == 1 and case.table.cast() and case.right(case.copies[0], case.weights[0])


OWNERS: dict[str, Callable[[Tensor], object]] = {
    "a reference in Python": lambda copy: copy,
    "a view": lambda copy: copy[:1],
    "a backward that saved it": lambda copy: copy * torch.ones((), requires_grad=True),
}


@pytest.mark.parametrize("owner", OWNERS)
def test_another_owner_of_a_copy_is_seen(owner: str) -> None:
    case = Case()
    case.table.note_owners()
    assert case.table.owned_as_noted()
    owns = OWNERS[owner](case.copies[0])
    assert owns is not None and not case.table.owned_as_noted()
    del owns
    assert case.table.owned_as_noted()


OTHERS: dict[str, Callable[[Case], object]] = {
    "other sharers": lambda case: setattr(case.memories[1], "roster", 3),
    "a step that is open": lambda case: setattr(case.memories[1], "step_open", True),
    "another buffer": lambda case: setattr(case.records[1], "buffer", 6),
    "a doubt": lambda case: setattr(case.memories[1], "doubt", 7),
    "a word that was written": lambda case: ctypes.memset(case.weights[1].data_ptr(), 1, 1),
    "other memory": lambda case: setattr(case.weights[0], "data", torch.randn(70, 501)),
    "a weight that was freed": lambda case: case.weights.pop(0),
    "memory that is given out no more": lambda case: storages.discard_memory(case.weights[0], "gone"),
}


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("other", OTHERS)
def test_nothing_is_decided_once_anything_else_changed(other: str, written: bool) -> None:
    case = Case()
    assert case.table.find_stale() == 5 and case.table.cast() and case.table.find_stale() == 0
    if written:
        case.weights[2].mul_(-1)
    OTHERS[other](case)
    assert case.table.find_stale() == -1


@pytest.mark.parametrize("gone", ["another buffer", *list(OTHERS)[-3:]])
def test_nothing_is_cast_if_a_weight_is_elsewhere_by_then(gone: str) -> None:
    case = Case()
    assert case.table.find_stale() == 5
    OTHERS[gone](case)
    assert not case.table.cast() and all((copy == 7).all() for copy in case.copies)
    assert not any(record.mark for record in case.records)
