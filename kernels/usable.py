"""Whether Triton kernels can be launched here: asked once, before a graph is given any."""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ampcompile.torch_private import tracing

log = logging.getLogger("ampcompile")


@functools.cache
def usable() -> bool:
    """Whether Triton is there and works. If not, says why in the log, once.

    A kernel is launched to find out, which needs what all of them need: a driver, a compiler for the launcher.
    Without a GPU, as where graphs are traced for one, it is enough that Triton can be imported.
    """
    try:
        from .triton import probe

        if torch.cuda.is_available():
            with tracing.computing_for_real():
                probe.probe()
    except Exception as error:  # whatever is wrong with an installation
        log.warning("Triton kernels can't be used, Inductor's own code is: %s: %s", type(error).__name__, error)
        return False
    return True


def memory_of(device: torch.device) -> int:
    """Bytes of a GPU's memory, 0 if there is none."""
    return torch.cuda.get_device_properties(device).total_memory if torch.cuda.is_available() else 0


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it that of `x`. Where `x` is only traced, nothing is launched."""
    return torch.cuda.device(x.device) if type(x) in (Tensor, torch.nn.Parameter) else nullcontext()
