"""Tables on the device that tell a kernel where many tensors lie and which piece of which tensor a program takes."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ampcompile.errors import ScalerError
from ampcompile.torch_private import storages

CHUNK = 8192
"""Elements a program takes: few enough that tails waste little, many enough that a table entry costs nothing."""


class Words:
    """64-bit words on the device that follow those of the host; copied without a sync, and only when they change."""

    def __init__(self) -> None:
        self._host: np.ndarray | None = None
        self._device: Tensor | None = None
        self._spare: Tensor | None = None
        self._captured: list[Tensor] = []

    def follow(self, words: np.ndarray, device: torch.device) -> Tensor:
        """`words` (int64) on `device`. A graph under capture gets a table of its own, filled at each replay."""
        if capturing(device):
            if self._device is None or self._spare is None or self._spare.numel() != len(words):
                raise ScalerError(
                    "found a CUDA graph capture, expected a step with these parameters and gradients just before it: "
                    "run scaler.step (and scaler.clip_grad_norm_) once outside of the graph"
                )
            host, self._spare = self._spare, None
            self._captured.append(host)  # replays read it
            host.numpy()[:] = words
            return torch.empty_like(self._device).copy_(host, non_blocking=True)
        if self._spare is None or self._spare.numel() != len(words):
            self._spare = host_words(len(words), device)
        if self._device is None or self._host is None or not np.array_equal(words, self._host):
            if self._device is None or self._device.numel() != len(words):
                self._device = torch.empty(len(words), dtype=torch.int64, device=device)
            host = host_words(len(words), device)
            host.numpy()[:] = words
            self._device.copy_(host, non_blocking=True)
            self._host = words
        return self._device


def host_words(size: int, device: torch.device) -> Tensor:
    """Memory of the host from which the device copies without holding up the host."""
    return torch.empty(size, dtype=torch.int64, pin_memory=device.type == "cuda")


def capturing(device: torch.device) -> bool:
    """Whether launches go into a CUDA graph instead of running."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stream(device: torch.device) -> int:
    """The current stream's address; 0 on the CPU."""
    return storages.current_stream(device) if device.type == "cuda" else 0


def keep_for_stream(table: Tensor) -> None:
    """Have a table's memory wait, once nobody holds it, for what the current stream does until then."""
    if table.is_cuda:
        table.record_stream(torch.cuda.current_stream(table.device))


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it this one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def addresses(*rows: Sequence[Tensor | None]) -> np.ndarray:
    """int64, row after row: where each tensor lies; 0 for None."""
    return np.array([0 if t is None else t.data_ptr() for row in rows for t in row], dtype=np.int64)


def sizes(tensors: Sequence[Tensor]) -> np.ndarray:
    """int64: number of elements of each."""
    return np.array([t.numel() for t in tensors], dtype=np.int64)


def float_bits(values: np.ndarray) -> np.ndarray:
    """float64 numbers as 64-bit words."""
    return np.ascontiguousarray(values, dtype=np.float64).reshape(-1).view(np.int64)


def chunks(numels: np.ndarray, chosen: np.ndarray, device: torch.device, workspace: dict[Any, Any]) -> Tensor:
    """int32 [chunks, 2]: tensor and number within it of every chunk of the `chosen` tensors, short ones last.

    Kept for good: a captured graph may read it.
    """
    key = ("chunks", CHUNK, numels.tobytes(), chosen.tobytes())
    if key not in workspace:
        if capturing(device):
            raise ScalerError(
                "found parameters of new sizes in a CUDA graph capture, expected a step with them just before it: "
                "run scaler.step once outside of the graph"
            )
        counts = -(-numels[chosen] // CHUNK)
        tensor = np.repeat(chosen, counts)
        number = np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)
        tail = (number + 1) * CHUNK > numels[tensor]
        order = np.argsort(tail, kind="stable")
        pairs = torch.from_numpy(np.stack([tensor, number], axis=1)[order].astype(np.int32))
        if device.type == "cuda":
            pairs = pairs.pin_memory()
        workspace[key] = pairs.to(device, non_blocking=True)
    return workspace[key]


def step_words(
    numels: np.ndarray,
    group_of: Sequence[int],
    rows: Sequence[Sequence[Tensor | None]],
    settings: np.ndarray,
    lrs: Sequence[float | Tensor],
    workspace: dict[Any, Any],
) -> Tensor:
    """What an optimizer's kernel reads: sizes, groups, rows of addresses, float64 settings [groups, n] as bits.

    A learning rate that is a tensor becomes the first setting of its group on the device.
    """
    device = next(tensor.device for tensor in rows[0] if tensor is not None)
    host = np.concatenate([numels, np.array(group_of, dtype=np.int64), addresses(*rows), float_bits(settings)])
    words = workspace.setdefault("step words", Words()).follow(host, device)
    on_device = words[-settings.size :].view(torch.float64).view(settings.shape)
    for row, lr in zip(on_device, lrs, strict=True):
        if isinstance(lr, Tensor):
            row[0].copy_(lr.reshape(()))
    return words
