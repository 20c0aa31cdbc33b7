"""Check, once per process, if Triton kernels can be launched here, before any graph uses one."""

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
    """True if Triton is installed and works. If not, logs the reason, once.

    Tests it by launching a kernel, which needs a driver and a compiler for the launcher, as all kernels do. Without a
    GPU, as where graphs are only traced for one, it is enough that Triton can be imported.
    """
    try:
        from .triton import launching

        if torch.cuda.is_available():
            with tracing.on_real_tensors():
                launching.probe()
    except Exception as error:  # a broken installation may raise any error
        log.warning("Triton kernels can't be used, Inductor's own code is: %s: %s", type(error).__name__, error)
        return False
    return True


def memory_of(device: torch.device) -> int:
    """Bytes of a GPU's memory; 0 of a CPU, and without a GPU."""
    known = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).total_memory if known else 0


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Make the device of `x` current, since Triton launches there; does nothing if `x` is only traced."""
    return torch.cuda.device(x.device) if type(x) in (Tensor, torch.nn.Parameter) else nullcontext()
