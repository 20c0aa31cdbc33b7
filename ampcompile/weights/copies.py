"""One low-precision copy of one weight: what it was cast from, whether it is fresh, whether it may be overwritten."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Container, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ampcompile.kernels.cast_many import cast_many_
from ampcompile.kernels.packed_linear import pack
from ampcompile.torch_private import storages

from . import gpu
from .memory import Memory, memory_of
from .sample import Sample, places

TRIAL = 8
"""How many calls must find a tensor unwritten that is neither parameter nor buffer before its copy lives on."""
_DTYPES = (torch.bfloat16, torch.float16)

copies: weakref.WeakValueDictionary[tuple, Copy] = weakref.WeakValueDictionary()
_passes = 0
_casting = False


class Weight(NamedTuple):
    """A weight for the time of one refresh."""

    key: int
    """The id of the tensor."""
    tensor: Tensor
    """An alias of it: it stays in its memory, and holds it, even if another thread gives the weight other data."""


class Copy:
    """A weight in low precision, shared by all graphs that read it; freed with the last of them, or with the weight.

    `mark` and `doubt` are the memory's at the last cast, which may have been written since if one is another object.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.memory: Memory = memory_of(weight)
        self.memory.copies.add(self)
        self.dtype = dtype
        self.mark: object = None  # as long as the buffer holds nothing
        self.doubt: object = None
        self.places = places(weight)
        self.sample, self.words = Sample([self.places]), b""
        self.in_place = False
        self.lent_to_step = False
        self.trial = 0
        self.strided_readers = 0
        self.reads = 0
        self.buffer: object = None  # another one for each buffer
        self.tensor: Tensor | None = None  # of the weight's strides; its one reference in Python while it is idle
        self.packed: Tensor | None = None  # the same numbers in the blocks of oneDNN's products

    def _allocate(self, weight: Tensor) -> None:
        """Take a fresh buffer; the old one stays with whoever saved it."""
        self.tensor = torch.empty_strided(weight.shape, weight.stride(), dtype=self.dtype, device=weight.device)
        self.buffer = object()
        self._storage = storages.storage_key(self.tensor)
        self._idle = self._owners()

    def _owners(self) -> tuple[int, int, int]:
        """Owners of the buffer: of its tensor in C++, of its storage (views are), of its tensor in Python."""
        tensor = self.tensor
        assert tensor is not None
        return storages.tensor_users(tensor), storages.storage_users(self._storage), sys.getrefcount(tensor)

    def writable(self) -> bool:
        """Whether the buffer may be overwritten: no backward that is still to come saved it or a view of it."""
        return self.tensor is not None and (self.in_place or self._owners() == self._idle)

    def _unwritten(self) -> bool:
        """Whether there is no sign of a write since the cast."""
        return self.mark is self.memory.mark and self.sample.read() == self.words

    def fresh(self, strided: bool) -> bool:
        """Whether the copy is known to hold what the weight holds; `strided`: in the weight's strides."""
        held = self.tensor is not None or (self.packed is not None and not strided)
        return held and self.doubt is self.memory.doubt and self._unwritten()

    def compare(self, weight: Weight, doubtful: bool) -> bool:
        """Whether the copy holds what the weight holds, by all their bits, if there is no sign of a write.

        It costs as much as a cast, but the buffer and its packed form stay. Not on GPUs: the host would have to wait.
        """
        doubt = self.memory.doubt
        if self.tensor is None or self.tensor.is_cuda or not self._unwritten():
            return False
        if not torch.equal(self.tensor.view(torch.int16), weight.tensor.to(self.dtype).view(torch.int16)):
            return False
        self.trial = max(self.trial - 1, 0)
        self.doubt = None if doubtful or self.trial else doubt
        return True

    def prepare(self, weight: Weight) -> tuple[object, object, bytes]:
        """Have a buffer that may be overwritten, and hold nothing. Returns what the weight is now, for `note_cast`."""
        if not self.fresh(strided=False):
            self.packed, self.reads = None, 0
        self.mark = None
        if not self.writable():
            self._allocate(weight.tensor)
        if self.trial:
            self.trial = TRIAL
        return self.memory.mark, self.memory.doubt, self.sample.read()

    def note_cast(self, mark: object, doubt: object, sampled: bytes) -> None:
        """The buffer holds what the weight held when it had this mark and these words; `doubt` None: for now."""
        self.doubt, self.words = doubt, sampled
        self.mark = mark

    def rewritten(self) -> None:
        """The buffer holds what the weight holds now."""
        self.packed, self.reads = None, 0
        self.note_cast(self.memory.mark, self.memory.doubt, self.sample.read())

    def pack(self) -> None:
        """Take the packed form too, and instead of the other one where nobody reads that."""
        assert self.tensor is not None
        with torch.inference_mode(False), torch.no_grad():
            self.packed = pack(self.tensor.contiguous())
        if not self.strided_readers:
            self.tensor = None

    def free(self) -> None:
        """The weight is gone."""
        self.mark = self.tensor = self.packed = None

    def nbytes(self) -> int:
        """What the buffers weigh that are held now."""
        strided = 0 if self.tensor is None else self.tensor.nbytes
        return strided + (0 if self.packed is None else self.packed.numel() * self.packed.itemsize)


def copy_of(weight: Tensor, dtype: torch.dtype) -> Copy:
    """The one copy of a weight in a dtype, made if there is none yet."""
    key = _place(weight), dtype
    if (copy := copies.get(key)) is None or copy.memory.storage() is None:
        copy = copies[key] = Copy(weight, dtype)
    return copy


def copies_of(weight: Tensor) -> list[Copy]:
    """All copies of a weight."""
    if not copies:
        return []
    place = _place(weight)
    return [copy for dtype in _DTYPES if (copy := copies.get((place, dtype))) is not None]


def _place(weight: Tensor) -> tuple:
    """Copies belong to memory as it is laid out, not to tensor objects: tied weights share one."""
    return storages.storage_key(weight), weight.data_ptr(), weight.shape, weight.stride(), weight.dtype


def refresh(reads: Iterable[tuple[Copy, Weight, bool]], every: bool, doubtful: Container[Memory]) -> None:
    """Cast the weights whose copies are out of date, or `every` one, all in one pass.

    A read is a copy, its weight, and whether it is read in the weight's strides. What lies in `doubtful` memory is
    right for now only.
    """
    global _passes, _casting
    read = {
        id(copy): (copy, weight)
        for copy, weight, strided in reads
        if every or copy.memory in doubtful or not copy.fresh(strided)
    }.values()
    stale = [(c, weight) for c, weight in read if every or not c.compare(weight, c.memory in doubtful)]
    if not stale:
        return
    _casting = True
    states = [copy.prepare(weight) for copy, weight in stale]
    written = [copy.tensor for copy, _ in stale if copy.tensor is not None]
    cast_many_(written, [weight.tensor for _, weight in stale])
    gpu.cast_done(written)
    for (copy, _), (mark, doubt, sampled) in zip(stale, states, strict=True):
        if not every:
            copy.note_cast(mark, None if copy.trial or copy.memory in doubtful else doubt, sampled)
    _passes += 1
    _casting = False


def interrupted() -> bool:
    """Whether a pass has begun and not ended: what its copies hold is unknown."""
    return _casting


def recover() -> None:
    """After a pass that was interrupted: its copies have no mark, and are cast when they are read again."""
    global _casting
    _casting = False


def cast_passes() -> int:
    """How many refresh passes have cast something."""
    return _passes
