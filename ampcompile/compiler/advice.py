"""Warnings while a graph is compiled, each once: float16 without a scaler, a type for which the CPU has no units."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Sequence
from typing import Any

import torch

from ampcompile.passes.analysis.wide_products import advice_without_units

log = logging.getLogger("ampcompile")


def warn_of_unscaled(device_type: str, example_inputs: Sequence[Any]) -> None:
    """Warn, once, that a graph about to be compiled trains in float16 while this process has no scaler."""
    if not torch.is_autocast_enabled(device_type) or torch.get_autocast_dtype(device_type) is not torch.float16:
        return
    trains = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)
    if trains:
        _look_for_a_scaler(device_type)


@functools.cache
def _look_for_a_scaler(device_type: str) -> None:
    # Not `isinstance`: it reads `__class__`, which makes lazy objects of some packages load modules.
    if not any(issubclass(type(instance), torch.amp.GradScaler) for instance in gc.get_objects()):
        log.warning(
            "ampcompile: a graph trains in float16 on %s, and no GradScaler has been made: small gradients become zero "
            "there. Scale the loss (see ampcompile.GradScaler), or compile with options={'dtype': torch.bfloat16}",
            device_type,
        )


@functools.cache
def warn_of_missing_units(low: torch.dtype) -> None:
    """Warn, once, that a graph computes in a 16-bit type for which this CPU has no units."""
    log.warning("ampcompile: %s", advice_without_units(low))
