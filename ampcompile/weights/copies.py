"""One low-precision copy of one weight: its buffer, and how it is made from the weight.

The host never waits for a GPU, which runs behind it, with several streams: launches wait for one another instead.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ampcompile.kernels import native
from ampcompile.kernels.cast_many import cast_many_
from ampcompile.kernels.packed_conv import Blocks
from ampcompile.torch_private import marks, storages

from .spec import Form
from .store import store
from .table import Status, array, places

TRIAL = 8  # calls in a row that must find a tensor, neither parameter nor buffer, unwritten before its copy is kept


class Copy:
    """A form of a weight, shared by all graphs that read it; freed with its last graph or weight, or by `free`.

    `blocks`: those of oneDNN that it is packed in; None: strided as the weight. The table holds the buffer.
    """

    def __init__(self, weight: Tensor, form: Form, blocks: Blocks | None, trial: bool) -> None:
        self.form, self.blocks, self.key = form, blocks, storages.storage_key(weight)
        self.on_gpu, self.in_place = weight.is_cuda, False
        self.castable = weight.dtype == torch.float32 and not (self.on_gpu or blocks is not None or form.quantized)
        sampled, nbytes = places(weight)
        how = native.DTYPE_CODES.get(form.dtype, 0), self.castable
        self.handle = store.table.add_copy(weight, *how, len(sampled), sampled.ctypes.data, nbytes)
        store.by_handle[self.handle] = self
        weakref.finalize(self, store.table.drop, self.handle).atexit = False
        self._freed_with = weakref.ref(
            storages.untyped_storage(weight), functools.partial(_storage_freed, weakref.ref(self))
        )
        self.trial = TRIAL if trial else 0  # calls in a row that are still to find the weight unwritten
        self.launch: LastLaunch | None = None  # the last one that wrote the buffer, on a GPU
        self.streams: set[int] = set()  # which the allocator waits for before it reuses the memory

    @property
    def tensor(self) -> Tensor | None:
        """The buffer. While a caller has it, it isn't overwritten."""
        return store.table.buffer_of(self.handle)

    def allocate(self, weight: Tensor) -> None:
        """Replace the buffer; a backward that saved the old one keeps it."""
        self.streams = set()
        store.table.put(self.handle, self.form.empty_like(weight))

    def keep_in_place(self) -> None:
        """Overwrite the buffer from now on even if a backward waits for it, as replayed CUDA graphs need."""
        self.in_place = True
        store.table.fix(self.handle)

    def free(self, gone: bool) -> None:
        """Free the buffer, but not one that a captured CUDA graph writes unless the weight was freed (`gone`)."""
        if gone:
            store.captured.discard(self)
        if self not in store.captured:
            store.table.put(self.handle, None)

    def nbytes(self) -> int:
        tensor = self.tensor
        return 0 if tensor is None else tensor.numel() * tensor.itemsize


def _storage_freed(reference: weakref.ref[Copy], _: object) -> None:
    if (copy := reference()) is not None:
        copy.free(gone=True)


def place_of(weight: Tensor) -> tuple[Any, ...]:
    """Key of a weight's copies: its memory and layout, not the tensor object, so that tied weights share one."""
    return storages.storage_key(weight), weight.data_ptr(), weight.shape, weight.stride(), weight.dtype


def copy_of(weight: Tensor, form: Form, blocks: Blocks | None = None, trial: bool = False) -> Copy:
    """Return the one copy of a weight in a form; it is made if there is none yet."""
    key = *place_of(weight), form, blocks
    if (copy := store.copies.get(key)) is None:
        copy = store.copies[key] = Copy(weight, form, blocks, trial)
    return copy


def found_copy(weight: Tensor, form: Form, blocks: Blocks | None = None) -> Copy | None:
    """Return a weight's copy in a form if there is one."""
    return store.copies.get((*place_of(weight), form, blocks))


def packed_copy(plain: Copy, weight: Tensor, blocks: Blocks | None) -> Copy:
    """Pack a fresh copy in blocks, unless that was done; returns the packed one."""
    assert blocks is not None
    copy, strided = copy_of(weight, plain.form, blocks), plain.tensor
    if strided is not None and not is_fresh(copy, weight):
        store.table.put(copy.handle, blocks.pack(strided.contiguous()))
        store.table.note_made_of(copy.handle, plain.handle)
    return copy


def is_fresh(packed: Copy, weight: Tensor) -> bool:
    """Return True if a packed copy is fresh; if that is in doubt, the strided one is compared with the weight."""
    status = statuses([packed])[0].freshness
    if status == Status.DOUBTFUL:
        plain = found_copy(weight, packed.form)
        if plain is not None and not freshen([(plain, weight)]):  # else its numbers, and both copies' marks, are others
            store.table.note_made_of(packed.handle, plain.handle)
            return True
    return status == Status.FRESH


@marks.named("amp: refresh copies of weights")
def freshen(reads: Sequence[tuple[Copy, Tensor]]) -> bool:
    """Make strided copies hold their weights' values: compare doubtful ones, cast stale ones. True if one was cast.

    A copy that a pending backward holds gets another buffer. Where the host would have to wait for a GPU's answer, and
    for other types than float32, doubtful copies are cast too.
    """
    of, cast = dict(reads), set[Copy]()
    compared = left = [copy for copy in of if copy.castable]
    for _ in range(2):  # what is compared, and differs, may need another buffer
        if left:
            _prepare(left, of)
            written = np.zeros(len(left), np.int64)
            on_rows(store.table.renew_all, left, torch.get_num_threads(), written.ctypes.data)
            cast.update(compress(left, written))
            marked = zip(left, statuses(left), strict=True)
            left = [copy for copy, s in marked if s.freshness == Status.STALE and copy not in cast]
    for copy in compared:
        if copy.trial:
            copy.trial = TRIAL if copy in cast else copy.trial - 1
            if copy.trial:
                store.table.mark_maybe_written(copy.handle)
    others = [*left, *_prepare([copy for copy in of if not copy.castable], of, Status.DOUBTFUL)]
    if others:
        on_rows(store.table.note_begun, others)
        wait_for_casts(others)
        cast_into([(copy.form, copy.tensor, of[copy]) for copy in others])
        cast_done(others)
        on_rows(store.table.note_made, others)
    return bool(cast or others)


def _prepare(copies: Sequence[Copy], of: Mapping[Copy, Tensor], least: Status = Status.STALE) -> list[Copy]:
    """Give each copy that is to be cast a buffer that may be overwritten; returns these: of `least` status, or more."""
    looked_at = list(zip(copies, statuses(copies), strict=True))
    for copy, status in looked_at:
        if status & Status.UNWRITABLE and status.freshness >= least:
            copy.allocate(of[copy])
    return [copy for copy, status in looked_at if status.freshness >= least]


def statuses(copies: Sequence[Copy]) -> list[Status]:
    """Look at weights, and return the status of each copy."""
    codes = np.zeros(len(copies), np.int64)
    on_rows(store.table.statuses, copies, codes.ctypes.data)
    return list(map(Status, codes.tolist()))


def on_rows(function: Callable[..., object], copies: Iterable[Copy], *more: int) -> None:
    """Call a function of the table on these copies."""
    handles = array([copy.handle for copy in copies])
    function(len(handles), handles.ctypes.data, *more)


def cast_into(jobs: Sequence[tuple[Form, Tensor | None, Tensor]]) -> None:
    """Write weights, rounded, into buffers."""
    held = [(form, buffer, weight) for form, buffer, weight in jobs if buffer is not None]
    narrow = [(buffer, weight) for form, buffer, weight in held if not form.wide and not form.quantized]
    cast_many_([buffer for buffer, _ in narrow], [weight for _, weight in narrow])
    quantized = [(buffer, weight) for form, buffer, weight in held if form.quantized]
    if quantized:
        from ampcompile.kernels.fp8 import quantize_many_  # defines ops that few need

        quantize_many_([buffer for buffer, _ in quantized], [weight for _, weight in quantized])
    for form, buffer, weight in held:
        if form.wide:
            buffer.copy_(weight.to(form.dtype))


def cast_anew(weights: Sequence[Tensor], forms: Sequence[Form]) -> list[Tensor]:
    """Make copies that nobody keeps, one of each weight in each form."""
    keys = [(form, place_of(weight)) for weight, form in zip(weights, forms, strict=True)]
    made = {key: (key[0], key[0].empty_like(w), w) for key, w in zip(keys, weights, strict=True)}
    cast_into(list(made.values()))
    return [made[key][1] for key in keys]


class LastLaunch:
    """The last launch that wrote some copies: launches on other streams wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))
        self.stream = storages.current_stream(device)

    def wait(self) -> None:
        """Make the current stream wait for the launch; the host doesn't wait."""
        if self.stream != storages.current_stream(self._device):
            self._event.wait(torch.cuda.current_stream(self._device))


def wait_for_casts(copies: Iterable[Copy]) -> None:
    """Make the current streams wait for the last launches that wrote these copies."""
    for launch in {copy.launch for copy in copies}:
        if launch is not None:
            launch.wait()


def order_on_current_stream(copies: Iterable[Copy], buffers: Iterable[Tensor]) -> None:
    """Let the current streams use these copies: they wait for the casts, and the allocator for them."""
    copies = list(copies)
    wait_for_casts(copies)
    for copy, buffer in zip(copies, buffers, strict=True):
        if copy.on_gpu and (stream := storages.current_stream(buffer.device)) not in copy.streams:
            copy.streams.add(stream)
            buffer.record_stream(torch.cuda.current_stream(buffer.device))


def cast_done(copies: Sequence[Copy]) -> None:
    """Record that copies were just written, each on the current stream of its device."""
    on_gpus = [(copy, buffer) for copy in copies if copy.on_gpu and (buffer := copy.tensor) is not None]
    if on_gpus and torch.cuda.is_current_stream_capturing():
        return  # the captured graph keeps the order
    for device in {buffer.device for _, buffer in on_gpus}:
        launch, written = LastLaunch(device), [copy for copy, buffer in on_gpus if buffer.device == device]
        for copy in written:
            copy.launch = launch
        on_rows(store.table.note_launch, written, launch.stream)
    order_on_current_stream([copy for copy, _ in on_gpus], [buffer for _, buffer in on_gpus])


def capturing(weights: Iterable[Tensor]) -> bool:
    """Return True if launches go into a CUDA graph now: it must cast at each replay, as no host code checks weights."""
    return any(weight.is_cuda for weight in weights) and torch.cuda.is_current_stream_capturing()
