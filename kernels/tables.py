"""Tables on the device for kernels over many tensors: their addresses, and the chunk of each program."""

import threading
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from ampcompile.errors import OptimizerError
from ampcompile.torch_private import storages

CHUNK = 8192
"""Elements of a program's chunk: few enough that tails waste little, many enough that a table entry costs nothing."""
CODES = 64  # states in 8 bits that have one scale, in C++ too
LEAST_SCALES = 2.0**-117, 2.0**-55
"""Scales below, of first and of second moments, are 0"""
LONG_MEMORY = 0.99
"""Betas above round the first moment at random"""
SPAN = 128  # 16-bit parameters of one checksum, in C++ too: a warp of a GPU adds up that many without a barrier

SCALE_BYTES = 16
"""Bytes behind the two matrices of a quantized weight with one scale: that, the largest finite magnitude, nothing."""
LEAST_BITS = (127 - 100) << 23
"""The bits of the least magnitude that a quantized weight's scale is made of, a float32."""
CARRY_ABOVE_1_75 = 0x1FFFFF
"""Carries into a float32's exponent if its fraction is above 1.75, that of e4m3's largest number, 1.75 * 2**8."""
EXPONENT_SUM = 127 + 8 + 127
"""The sum of the biased exponents of a magnitude, carried, and of its factor, a power of two."""

ROW_ROW, BESIDE_ROW, BUFFERS_ROW = -7, -4, -2  # rows of `StepTable.addresses`
SPARE_HOST_BUFFERS = 4
"""Steps of one optimizer that a CUDA graph can hold: host memory can't be pinned during its capture."""
CHUNK_TABLES = 8
"""Chunk tables kept per optimizer and device, for the sets of parameters that had gradients most recently."""


class _Captured(threading.local):
    """Tables that captured CUDA graphs read, or lists of them."""

    tables: list[Any] = []  # noqa: RUF012  of all threads; nothing leaves it by itself, as no graph tells when it goes
    followed: Collection[Any] = ()  # the settings that are written before each replay
    used: Any = deque(maxlen=0)  # noqa: RUF012  the settings of each step, None if it has none for replays


_captured = _Captured()


@contextmanager
def kept_in(tables: list[Tensor], followed: "Collection[SettingsTable]" = ()) -> Iterator[list[Any]]:
    """Add to `tables` the tables that graphs captured in this thread read meanwhile; clear it once the graphs are gone.

    It must not be cleared as long as a replay may be running: the memory would be handed out again. `followed`: the
    settings that the caller writes before each replay. Gives the list of the settings of all steps in these graphs.
    """
    for table in list(_short):
        table.fill_up()
    _Captured.tables.append(tables)
    _captured.tables, _captured.followed, _captured.used = tables, followed, []
    try:
        yield _captured.used
    finally:
        del _captured.tables, _captured.followed, _captured.used


class Kind(NamedTuple):
    """The tensors of one launch."""

    grad: torch.dtype
    param: torch.dtype
    beside: torch.dtype | None  # the type of copies, or of what is kept beside 16-bit parameters
    state: torch.dtype  # of the states that may be coded
    has_state: bool  # they have the optimizer's optional state
    chosen: np.ndarray  # their indices


class QuantizedKind(NamedTuple):
    """The quantized weights of one launch."""

    dtype: torch.dtype
    by_rows: bool
    chosen: np.ndarray  # their indices
    rows: np.ndarray  # the words of each, see `quantize_many.kinds_of`
    tiles: np.ndarray  # the numbers of their tiles
    order: np.ndarray  # 0, 1, and so on: the launch's own indices
    notes: np.ndarray  # how many 8 bytes the notes of each take


@dataclass(eq=False)
class GradTable:
    """Sizes, addresses and types of gradients on one device; int64 arrays."""

    device: torch.device
    numels: np.ndarray
    addresses: np.ndarray  # may be written, as long as nothing else changes
    codes: np.ndarray  # the types, as codes of the C++ kernels
    by_dtype: dict[torch.dtype, np.ndarray]  # indices of the gradients of each type

    def __post_init__(self) -> None:
        self.pointers = pointers(self.numels, self.addresses, self.codes)
        self.place: int = self.pointers.ctypes.data


@dataclass(eq=False)
class StepTable:
    """The same of all tensors of a step."""

    grads: GradTable
    group_of: np.ndarray
    # Rows: gradients, parameters, the optimizer's states, the four of `states.Coding`, what is beside the parameters,
    # checksums, buffers of quantized weights; 0 for None. Then a row of zeros, on the GPU for notes on these weights.
    addresses: np.ndarray
    # Types of gradients, of parameters, of what is beside them, of the states that may be coded
    codes: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    optional: int  # the row of the optimizer's optional state
    padded: np.ndarray  # sizes, with the rows of those in 8 bits filled up to whole spans
    keys: list[Tensor] = field(default_factory=list)  # of random bits
    counts: list[Tensor] = field(default_factory=list)  # of steps that a GPU's kernel doesn't count
    copies: dict[int, tuple[int, int]] = field(default_factory=dict)  # address and code of each put there later
    kinds: list[Kind] = field(default_factory=list)  # the launches on a GPU; empty if they aren't known
    buffers: dict[int, int] = field(default_factory=dict)  # of quantized weights that a GPU's step writes
    quantized: list[QuantizedKind] = field(default_factory=list)  # the launches for these

    def __post_init__(self) -> None:
        self.pointers = pointers(self.grads.numels, self.addresses, *self.codes, self.group_of)
        self.place: int = self.pointers.ctypes.data


class DeviceTable:
    """Device copy of 64-bit words of the host, updated without a sync, and only when they change."""

    def __init__(self) -> None:
        self._content: tuple[bytes, bytes] | None = None  # of the table on the device
        self._device: Tensor | None = None
        # By the number of words: captures of several forms come after one another, each of its own parameters.
        self._spares: OrderedDict[tuple[int, torch.device], list[Tensor]] = OrderedDict()

    def fill_up(self) -> None:
        """Make up for the spares that captures took, or for those of a table that is new."""
        for (size, device), spares in self._spares.items():
            if missing := SPARE_HOST_BUFFERS - len(spares):
                spares += host_words(missing * size, device).view(missing, size)
        _short.discard(self)

    def upload(self, words: np.ndarray, device: torch.device, overwritten: bytes = b"") -> Tensor:
        """Return `words` (int64) on `device`. A CUDA graph under capture gets its own table, filled at each replay.

        `overwritten`: which words the caller overwrites on the device in each call; if it changes, all are sent again.
        """
        # Bytes, not the array: the caller writes the same array again for its next step.
        content, captures = (words.tobytes(), overwritten), capturing(device)
        if content == self._content and not captures:
            assert self._device is not None
            return self._device
        size = len(words), device
        if captures:
            fitting = self._spares.get(size)
            if not fitting:
                raise OptimizerError(
                    "found a CUDA graph capture, expected a step with these parameters and gradients just before it, "
                    f"and at most {SPARE_HOST_BUFFERS} steps of an optimizer in one capture: run the step (and "
                    "its clip_grad_norm_) once outside of the graph"
                )
            # Each replay reads this host memory again, so no later step may write there; and the table on the device is
            # the graph's own, as replays and steps outside of it alternate.
            host = fitting.pop()
            self._content = None
            _short.add(self)  # the next step outside, or captured step, makes up for the spare
            _captured.tables.append(host)
            host.numpy()[:] = words
            return torch.empty(len(words), dtype=torch.int64, device=device).copy_(host, non_blocking=True)
        self._spares.setdefault(size, [])
        self._spares.move_to_end(size)
        if len(self._spares) > CHUNK_TABLES:
            self._spares.popitem(last=False)
        self.fill_up()
        if self._device is None or self._device.numel() != len(words):
            self._device = torch.empty(len(words), dtype=torch.int64, device=device)
        # New pinned memory for each update: the copy before may not have run yet, and reads its own. torch's allocator
        # keeps it until the stream has read it.
        host = host_words(len(words), device)
        host.numpy()[:] = words
        self._device.copy_(host, non_blocking=True)
        self._content = content  # last: after an error above, the next call writes again
        return self._device


class SettingsTable(DeviceTable):
    """An optimizer's settings outside of graphs' memory, where the replays of captured steps read them."""

    followed = True
    """False once a graph was captured that has some of these settings as they were then"""

    def __init__(self) -> None:
        super().__init__()
        self.grads: set[int] = set()  # addresses of gradients by which captured graphs take steps

    def fill_up(self) -> None:
        """Nothing: it isn't uploaded in a capture."""

    def copy_to(self, words: Tensor, settings: np.ndarray) -> None:
        """Let each replay copy what this holds then, if it holds these settings now and is written before replays."""
        self.followed &= self in _captured.followed and self._content == (settings.tobytes(), b"")
        if self.followed and self._device is not None:
            _captured.tables.append(self._device)
            words.copy_(self._device)


_short: WeakSet[DeviceTable] = WeakSet()  # whose spares captures have taken


def host_words(size: int, device: torch.device) -> Tensor:
    """Host memory from which the device copies asynchronously: pinned for a GPU."""
    return torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")


def capturing(device: torch.device) -> bool:
    """True if the current stream captures launches into a CUDA graph instead of running them."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def by_triton(device: torch.device) -> bool:
    """True if Triton's kernels run on a device's tensors."""
    return device.type == "cuda"


def stream(device: torch.device) -> int:
    """The current stream's address; 0 on the CPU."""
    return storages.current_stream(device) if device.type == "cuda" else 0


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make this device the current one, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def addresses(*rows: Sequence[Tensor | None]) -> np.ndarray:
    """int64 [rows, tensors]: the address of each tensor; 0 for None."""
    return np.array([[0 if t is None else t.data_ptr() for t in row] for row in rows], dtype=np.int64)


def pointers(*arrays: np.ndarray) -> np.ndarray:
    """int64: where each array lies, as fields of a struct of the C++ kernels."""
    return np.array([array.ctypes.data for array in arrays], dtype=np.int64)


def sizes(tensors: Sequence[Tensor]) -> np.ndarray:
    """int64: the number of elements of each tensor."""
    return np.array([t.numel() for t in tensors], dtype=np.int64)


def float_bits(values: np.ndarray) -> np.ndarray:
    """float64 numbers as 64-bit words."""
    return np.ascontiguousarray(values, dtype=np.float64).reshape(-1).view(np.int64)


def chunks(numels: np.ndarray, chosen: np.ndarray, device: torch.device, workspace: dict[Any, Any]) -> Tensor:
    """int32 [chunks, 2]: tensor and number within it of every chunk of the `chosen` tensors, short ones last."""
    latest: dict[int, tuple[np.ndarray, Tensor]] = workspace.setdefault("latest chunks", {})
    captures = capturing(device)
    if not captures and (known := latest.get(id(chosen))) is not None:  # it holds the array, so no other has its id
        return known[1]
    cached: OrderedDict[Any, Tensor] = workspace.setdefault("chunks", OrderedDict())
    key = (CHUNK, numels.tobytes(), chosen.tobytes())
    if key not in cached:
        if captures:
            raise OptimizerError(
                "found parameters of new sizes in a CUDA graph capture, expected a step with them just before it: "
                "run the step once outside of the graph"
            )
        counts = -(-numels[chosen] // CHUNK)
        tensor = np.repeat(chosen, counts)
        number = np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)
        # Short chunks last: they fill the gaps that whole ones leave at a launch's end.
        tail = (number + 1) * CHUNK > numels[tensor]
        order = np.argsort(tail, kind="stable")
        pairs = torch.from_numpy(np.stack([tensor, number], axis=1)[order].astype(np.int32))
        if device.type == "cuda":
            pairs = pairs.pin_memory()
        cached[key] = pairs.to(device, non_blocking=True)
        if len(cached) > CHUNK_TABLES:
            cached.popitem(last=False)
    cached.move_to_end(key)
    # `latest` spares a steady step the bytes of the key. It holds the arrays of earlier plans, so it must not grow.
    if len(latest) >= CHUNK_TABLES:
        latest.clear()
    latest[id(chosen)] = chosen, cached[key]
    if captures:
        _captured.tables.append(cached[key])
    return cached[key]


def step_words(
    table: StepTable, settings: np.ndarray, lrs: Sequence[float | Tensor], workspace: dict[Any, Any]
) -> Tensor:
    """The table of an optimizer's kernel: sizes, groups, rows of addresses, float64 settings [groups, n] as bits.

    A learning rate that is a tensor becomes the first setting of its group on the device. Notes are zeros. Captured,
    the settings are those of the workspace's `SettingsTable` at each replay, if these are followed.
    """
    numels, device = table.grads.numels, table.grads.device
    host = np.concatenate([numels, table.group_of, table.addresses.reshape(-1), float_bits(settings)])
    by_device = bytes(isinstance(lr, Tensor) for lr in lrs)
    words = workspace.setdefault("step words", DeviceTable()).upload(host, device, by_device)
    if capturing(device):
        _captured.used.append(known := workspace.get("settings"))
        if known is not None:
            known.copy_to(words[-settings.size :], float_bits(settings))
            known.grads.update(table.grads.addresses.tolist())
    if table.quantized:
        words[notes_at(table) :][: len(numels)].zero_()
    if any(by_device):
        on_device = words[-settings.size :].view(torch.float64).view(settings.shape)
        for row, lr in zip(on_device, lrs, strict=True):
            if isinstance(lr, Tensor):
                row[0].copy_(lr.reshape(()))
    return words


def notes_at(table: StepTable) -> int:
    """The place of the row of notes in `step_words`."""
    return (1 + len(table.addresses)) * len(table.grads.numels)


def grad_launches(
    grads: GradTable, name: str, workspace: dict[Any, Any]
) -> tuple[Tensor, list[tuple[torch.dtype, Tensor]]]:
    """The table of gradients, sizes and addresses, and for each type of gradient the chunks of its launch."""
    host = np.concatenate([grads.numels, grads.addresses])
    words = workspace.setdefault(f"{name} words", DeviceTable()).upload(host, grads.device)
    of_types = grads.by_dtype.items()
    return words, [(dtype, chunks(grads.numels, chosen, grads.device, workspace)) for dtype, chosen in of_types]
