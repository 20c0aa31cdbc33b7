"""Start a kernel through its compiled form: Triton's own way binds and specializes all arguments in each launch."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton import knobs

from ampcompile.torch_private import optimizers

from .. import tables

LARGEST = 2**31 - 1  # of the integers that are passed in 32 bits
compiled_forms: dict[Any, tuple[Any, Any, Any, list[Any]]] = {}
"""By kernel, device, constants, and all that Triton specializes arguments on: how it is run, the function, its
description, and the constants as it takes them"""


class Constants(dict[str, Any]):
    """A kernel's constants and Triton's options by name; two of them are the same only if they are one object.

    So a launch needn't hash what is in it. Make one for each set of constants, and keep it.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def start(
    kernel: Any,
    programs: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    constants: Constants,
    device: torch.device,
) -> None:
    """Launch `programs` programs of a kernel that takes tensors, then numbers, then constants, on the current device.

    The kernel specializes on no number's value (`do_not_specialize`). The first launch with arguments of these types
    and alignments goes through Triton; so does each one while something hooks into launches.
    """
    addresses = [tensor.data_ptr() for tensor in tensors]
    key = (
        kernel,
        constants,
        device.index,
        *[tensor.dtype for tensor in tensors],
        *[address & 15 for address in addresses],
        *[type(number) is float or -LARGEST <= number <= LARGEST for number in numbers],
    )
    known = compiled_forms.get(key)
    if known is None or _hooked():
        compiled = kernel[(programs,)](*tensors, *numbers, **constants)
        arguments = [constants[name] for name in kernel.arg_names[len(tensors) + len(numbers) :]]
        compiled_forms[key] = compiled.run, compiled.function, compiled.packed_metadata, arguments
        return
    run, function, description, last = known
    run(programs, 1, 1, tables.stream(device), function, description, None, None, None, *addresses, *numbers, *last)


def table_on(device: torch.device, words: np.ndarray) -> Tensor:
    """Return int64 words on the current device. A capture records them as arguments of torch's launches."""
    if tables.capturing(device):
        table = torch.zeros(len(words), dtype=torch.int64, device=device)
        optimizers.add_(table.unbind(), words.tolist())  # a hundred in each launch
        return table
    host = tables.host_words(len(words), device)
    host.numpy()[:] = words
    return host.to(device, non_blocking=True)


def _hooked() -> object:
    """Return what is to be called around launches, if anything: a hook, from Triton 3.5 on a chain of them."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
