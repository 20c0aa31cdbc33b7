"""One low-precision copy of one weight: what it was cast from, whether it is fresh, whether it may be overwritten.

A graph without gradients may read it packed in oneDNN's blocks, once that pays; it then needs no other form.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ampcompile.kernels.cast_many import cast_many_
from ampcompile.kernels.packed_conv import Blocks
from ampcompile.kernels.renewal import CopyRecord
from ampcompile.kernels.round_many import round_many_
from ampcompile.torch_private import profiling, storages

from . import gpu
from .freshness import Memory, memory_of
from .sample import Sample, places
from .spec import Form
from .store import store

_tensor, _storage = attrgetter("tensor"), attrgetter("storage")

TRIAL = 8
"""Calls in a row that must find a tensor, neither parameter nor buffer, unwritten before its copy is kept."""
PAYS = 3
"""Reads of a copy before it is packed. Packing costs what it saves in as many calls: a weight that changes at every
call is never packed, and no program pays more than twice the least possible."""


class Copy(CopyRecord):
    """A weight in low precision, shared by all graphs that read it; freed with its last graph or weight, or by `free`.

    `mark` and `doubt` are the memory's numbers at the last cast. If its mark is another one now, it was written since;
    if its doubt is, it may have been. A mark of 0: the buffer's values are invalid; a doubt of 0: they are valid in the
    present call only. `buffer`: a number, replaced with each allocation; 0: there is none.
    """

    def __init__(self, weight: Tensor, form: Form) -> None:
        self.memory: Memory = memory_of(weight)
        self.memory.copies.add(self)
        self.form = form
        self.places = places(weight)
        self.sample = Sample([self.places])
        self._words = ctypes.create_string_buffer(self.sample.nbytes)
        self.words_address = ctypes.addressof(self._words)
        self.in_place = False
        self.launch: gpu.LastLaunch | None = None  # the last one that wrote or compared the buffer, on a GPU
        self.trial = 0
        self.readers: Counter[Blocks | None] = Counter()  # how many sets read it in which blocks, None: strided
        self.tensor: Tensor | None = None  # strided as the weight; the only reference in Python while it is idle
        self.packed: dict[Blocks, Tensor] = {}  # the same values in oneDNN's blocks

    @property
    def words(self) -> bytes:
        """The sample of the weight at the last cast."""
        return self._words.raw

    @words.setter
    def words(self, words: bytes) -> None:
        self._words.raw = words

    def _allocate(self, weight: Tensor) -> None:
        """Allocate a new buffer; a backward that saved the old one keeps it."""
        self.buffer = store.new_mark()  # first: C++ reads the old tensor while it has the old number
        self.tensor = self.form.empty_like(weight)
        self.streams: set[int] = set()  # which the allocator waits for before it reuses the memory
        self.storage = storages.storage_key(self.tensor)
        self._idle = self._owners()

    def _owners(self) -> tuple[int, int, int]:
        """Count owners of the buffer: of its tensor in C++, of its storage (views too), of its tensor in Python."""
        tensor = self.tensor
        assert tensor is not None
        return storages.tensor_users(tensor), storages.storage_users(self.storage), sys.getrefcount(tensor)

    def waited_for(self) -> bool:
        """Return True if a pending backward saved the buffer or a view of it."""
        return self._owners() != self._idle

    def writable(self) -> bool:
        """Return True if the buffer may be overwritten: no backward waits for it, or its address must stay anyway."""
        return self.tensor is not None and (not self.waited_for() or self.in_place or self in store.captured)

    def _unwritten(self) -> bool:
        """Return True if no write since the cast is detected."""
        return self.mark == self.memory.mark and self.sample.read() == self.words

    def fresh(self, blocks: Blocks | None) -> bool:
        """Return True if the copy is known to hold the weight's values, strided or in these blocks."""
        allocated = self.tensor is not None or blocks in self.packed
        return allocated and self.doubt == self.memory.doubt and self._unwritten()

    def compare(self, weight: Tensor, doubtful: bool) -> bool:
        """Compare all bits of copy and weight if no write is detected; return True if they are equal.

        It costs as much as a cast, but the buffer and its packed form stay. Not on GPUs: the host would have to wait.
        """
        doubt = self.memory.doubt
        if self.tensor is None or self.tensor.is_cuda or not self._unwritten():
            return False
        bits = torch.int32 if self.form.wide else torch.int16
        rounded = weight.to(self.form.dtype).to(self.tensor.dtype)
        if not torch.equal(self.tensor.view(bits), rounded.view(bits)):
            return False
        self.trial = max(self.trial - 1, 0)
        self.doubt = 0 if doubtful or self.trial else doubt
        return True

    def prepare(self, weight: Tensor) -> tuple[int, int, bytes]:
        """Make the buffer writable and mark it invalid. Returns the weight's state now, for `note_cast`."""
        if self.doubt != self.memory.doubt or not self._unwritten():
            self.packed, self.reads = {}, 0
        self.mark = 0
        if not self.writable():
            self._allocate(weight)
        if self.trial:
            self.trial = TRIAL
        return self.memory.mark, self.memory.doubt, self.sample.read()

    def note_cast(self, mark: int, doubt: int, sampled: bytes) -> None:
        """Record that the buffer holds the weight's values at this mark and sample; `doubt` 0: for this call only."""
        self.doubt, self.words = doubt, sampled
        self.mark = mark

    def rewritten(self) -> None:
        """Record that the buffer holds the weight's present values."""
        self.packed, self.reads = {}, 0
        self.note_cast(self.memory.mark, self.memory.doubt, self.sample.read())

    def pack(self, blocks: Blocks) -> None:
        """Add a packed form; free the strided one once every set that reads the copy has its packed form."""
        if (strided := self.tensor) is None:  # another thread has freed it meanwhile
            return
        with torch.inference_mode(False), torch.no_grad():
            self.packed[blocks] = blocks.pack(strided.contiguous())
        self.buffer = store.new_mark()
        if all(read in self.packed for read, readers in self.readers.items() if readers):
            self.tensor = None

    def free(self, gone: bool) -> None:
        """Free the buffers, but not those that a captured CUDA graph writes unless the weight was freed (`gone`)."""
        if gone:
            store.captured.discard(self)
        elif self in store.captured:
            return
        store.change_buffers()
        self.mark = self.buffer = 0
        self.tensor = None
        self.packed = {}

    def nbytes(self) -> int:
        """Bytes of the buffers that are held now."""
        strided = 0 if self.tensor is None else self.tensor.nbytes
        return strided + sum(packed.numel() * packed.itemsize for packed in self.packed.values())


class IdleCheck:
    """Tells if the buffers of some copies may be written. Only owner counts are compared while these stay the same."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies, self._owners = copies, None

    def __call__(self) -> bool:
        tensors = list(map(_tensor, self._copies))
        users = (
            list(map(storages.tensor_users, tensors)),
            list(map(storages.storage_users, map(_storage, self._copies))),
        )
        owners: Any = *users, list(map(sys.getrefcount, tensors))
        del tensors  # `waited_for` counts Python references: these must not be among them
        if owners != self._owners:
            if any(copy.waited_for() and not copy.in_place for copy in self._copies):
                return False
            self._owners = owners
        return True


class Packed:
    """A slot whose copy a graph reads packed: `tensor` is the packed form once there is one."""

    __slots__ = ("blocks", "copy")

    def __init__(self, copy: Copy, blocks: Blocks) -> None:
        self.copy, self.blocks = copy, blocks

    @property
    def tensor(self) -> Tensor | None:
        """The form to read now."""
        strided = self.copy.tensor  # first: another thread may pack the copy meanwhile, and free this form
        return self.copy.packed.get(self.blocks, strided)


def count_reads(slots: list[Packed]) -> list[Packed]:
    """Count a read of each slot, pack those for which it pays now, and return those that are still to be packed."""
    for slot in slots:
        copy = slot.copy
        copy.reads += 1
        if copy.reads >= PAYS and slot.blocks not in copy.packed:
            copy.pack(slot.blocks)
    return [slot for slot in slots if slot.blocks not in slot.copy.packed]


def copy_of(weight: Tensor, form: Form) -> Copy:
    """Return the one copy of a weight in a form; it is made if there is none yet."""
    key = _place(weight), form
    if (copy := store.copies.get(key)) is None or copy.memory.storage() is None:
        store.made += 1
        if form not in store.forms:
            store.forms[:] = sorted((*store.forms, form), key=str)
        copy = store.copies[key] = Copy(weight, form)
    return copy


def copies_of(weight: Tensor) -> list[Copy]:
    """All copies of a weight."""
    place = _place(weight)
    return [copy for form in store.forms if (copy := store.copies.get((place, form))) is not None]


def _place(weight: Tensor) -> tuple:
    """Key of a weight's copies: its memory and layout, not the tensor object, so that tied weights share one."""
    return storages.storage_key(weight), weight.data_ptr(), weight.shape, weight.stride(), weight.dtype


@profiling.named("amp: refresh copies of weights")
def refresh(
    reads: Iterable[tuple[Copy, Tensor, Blocks | None]], doubtful: Container[Memory], tables: dict[Any, Any]
) -> set[Copy]:
    """Cast the weights whose copies are stale, all in one pass, and return these copies.

    A read is a copy, its weight, and the blocks it is read in, None for the weight's strides. A copy of `doubtful`
    memory is fresh for this call only. `tables`: of `cast_many_`.
    """
    read = {
        id(copy): (copy, weight) for copy, weight, blocks in reads if copy.memory in doubtful or not copy.fresh(blocks)
    }.values()
    stale = [(c, weight) for c, weight in read if not c.compare(weight, c.memory in doubtful)]
    if not stale:
        return set()
    store.begin_pass()
    states = [copy.prepare(weight) for copy, weight in stale]
    written = [copy for copy, _ in stale]
    gpu.follow(written)
    cast(stale, tables)
    gpu.cast_done(written)
    for copy, (mark, doubt, sampled) in zip(written, states, strict=True):
        copy.note_cast(mark, 0 if copy.trial or copy.memory in doubtful else doubt, sampled)
    store.end_pass()
    return set(written)


def cast(stale: Sequence[tuple[Copy, Tensor]], tables: dict[Any, Any] | None = None) -> None:
    """Write weights into the buffers of their copies."""
    _cast([(copy.form, copy.tensor, weight) for copy, weight in stale if copy.tensor is not None], tables)


def _cast(jobs: Sequence[tuple[Form, Tensor, Tensor]], tables: dict[Any, Any] | None = None) -> None:
    wide = [job for job in jobs if job[0].wide]
    round_many_([copy for _, copy, _ in wide], [weight for *_, weight in wide], [form.dtype for form, *_ in wide])
    narrow = [job for job in jobs if not job[0].wide]
    cast_many_([copy for _, copy, _ in narrow], [weight for *_, weight in narrow], tables)


def cast_for_capture(weights: Sequence[Tensor], forms: Sequence[Form]) -> list[Tensor]:
    """Make copies for the CUDA graph being captured, in the graph's memory; only its replays cast them."""
    keys = [(form, _place(weight)) for weight, form in zip(weights, forms, strict=True)]
    sources = dict(zip(keys, weights, strict=True))
    made = {key: (key[0], key[0].empty_like(weight), weight) for key, weight in sources.items()}
    _cast(list(made.values()))
    return [made[key][1] for key in keys]
