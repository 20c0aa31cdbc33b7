"""Start a kernel through its compiled form: Triton's own way binds and specializes all arguments in each launch."""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from .. import tables

LARGEST = 2**31 - 1  # of the integers that are passed in 32 bits
WORDS = 16  # of a table, written by one launch
_compiled: dict[Any, tuple[Any, Any, Any, list[Any]]] = {}
"""By kernel, device, constants, and all that Triton specializes arguments on: how it is run, the function, its
description, and the constants as it takes them"""


class Constants(dict[str, Any]):
    """A kernel's constants and Triton's options by name; two of them are the same only if they are one object.

    So a launch needn't hash what is in it. Make one for each set of constants, and keep it.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


_ONE_WARP = Constants(num_warps=1)


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
    known = _compiled.get(key)
    if known is None or _hooked():
        compiled = kernel[(programs,)](*tensors, *numbers, **constants)
        arguments = [constants[name] for name in kernel.arg_names[len(tensors) + len(numbers) :]]
        _compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, arguments
        return
    run, function, description, last = known
    run(programs, 1, 1, tables.stream(device), function, description, None, None, None, *addresses, *numbers, *last)


def table_on(device: torch.device, words: np.ndarray) -> Tensor:
    """Return int64 words on the current device; in a capture they are written by launches, as it records arguments."""
    if not tables.capturing(device):
        host = tables.host_words(len(words), device)
        host.numpy()[:] = words
        return host.to(device, non_blocking=True)
    padded = np.zeros(-(-len(words) // WORDS) * WORDS, np.int64)
    padded[: len(words)] = words
    table = torch.empty(len(padded), dtype=torch.int64, device=device)
    for i in range(0, len(padded), WORDS):
        start(amp_write, 1, (table[i:],), tuple(padded[i : i + WORDS].tolist()), _ONE_WARP, device)
    return table


def _hooked() -> object:
    """Return what is to be called around launches, if anything: a hook, from Triton 3.5 on a chain of them."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return getattr(enter, "calls", enter) or getattr(leave, "calls", leave)


@triton.jit(do_not_specialize=[f"w{i}" for i in range(WORDS)])
def amp_write(
    out,
    w0: tl.int64,
    w1: tl.int64,
    w2: tl.int64,
    w3: tl.int64,
    w4: tl.int64,
    w5: tl.int64,
    w6: tl.int64,
    w7: tl.int64,
    w8: tl.int64,
    w9: tl.int64,
    w10: tl.int64,
    w11: tl.int64,
    w12: tl.int64,
    w13: tl.int64,
    w14: tl.int64,
    w15: tl.int64,
):
    """Write words, in one program."""
    tl.store(out, w0)
    tl.store(out + 1, w1)
    tl.store(out + 2, w2)
    tl.store(out + 3, w3)
    tl.store(out + 4, w4)
    tl.store(out + 5, w5)
    tl.store(out + 6, w6)
    tl.store(out + 7, w7)
    tl.store(out + 8, w8)
    tl.store(out + 9, w9)
    tl.store(out + 10, w10)
    tl.store(out + 11, w11)
    tl.store(out + 12, w12)
    tl.store(out + 13, w13)
    tl.store(out + 14, w14)
    tl.store(out + 15, w15)
