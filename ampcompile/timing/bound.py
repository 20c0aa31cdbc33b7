"""The least time of a step: its products' arithmetic and bytes, and its update's bytes, at the device's own rates."""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ampcompile.dtypes import LOW
from ampcompile.torch_private import processor, pytree, storages
from ampcompile.torch_private.dispatcher import TorchDispatchMode

from .race import time_call

_WIDTH = {"cpu": 1024, "cuda": 8192}  # of the square matrices whose product is timed
_COPIED = {"cpu": 2**26, "cuda": 2**28}  # bytes that are copied to time the memory: more than caches hold


class Product(NamedTuple):
    """A matrix product, a convolution or attention: `flops`, bytes of operands and results, and their type."""

    dtype: torch.dtype
    device: str
    flops: float
    bytes: int


class Products(TorchDispatchMode):
    """Collects the products that run, of which torch counts the arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, formula = kwargs or {}, flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is None and hasattr(func, "decompose"):
            with self:
                if (result := func.decompose(*args, **kwargs)) is not NotImplemented:  # of a composite op
                    return result
        result = func(*args, **kwargs)
        if formula is not None:
            tensors = [tensor for tensor in pytree.tree_leaves((args, kwargs, result)) if isinstance(tensor, Tensor)]
            count = sum(storages.local_part(tensor).numel() * tensor.itemsize for tensor in tensors)
            first = tensors[0]
            self.found.append(Product(first.dtype, first.device.type, formula(*args, **kwargs, out_val=result), count))
        return result


def find_products(step: Callable[[], object]) -> list[Product]:
    """Run a step once, op by op: under autocast, as graphs are traced, but not compiled."""
    with torch.compiler.set_stance("force_eager"), Products() as products:
        step()
    return products.found


def update_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that an update moves at least: gradients and state read, weights and state read and written."""
    total = 0
    for param in (param for group in optimizer.param_groups for param in group["params"] if param.requires_grad):
        states = [
            tensor for tensor in optimizer.state.get(param, {}).values() if isinstance(tensor, Tensor) and tensor.dim()
        ]
        held = [storages.local_part(tensor) for tensor in (param, *states)]
        total += sum(2 * tensor.numel() * tensor.itemsize for tensor in held) + held[0].numel() * param.itemsize
    return total


def least_seconds(products: list[Product], streamed: int = 0) -> float:
    """Seconds that products take at least, each by its arithmetic or its bytes, plus those of `streamed` bytes."""
    if not products:
        return 0.0
    device = products[0].device
    memory = memory_rate(device)
    rates = {dtype: product_rate(device, dtype) for dtype in {product.dtype for product in products}}
    return streamed / memory + sum(max(p.flops / rates[p.dtype], p.bytes / memory) for p in products)


def product_rate(device: str, dtype: torch.dtype) -> float:
    """Operations in a second of a large product in a type, as measured now; of 8 bits, twice those of bfloat16.

    On a CPU products of 16 bits may run in float32, as they do where it only emulates the type: the faster counts.
    """
    if device == "cpu" and dtype in LOW:
        wide = product_rate(device, torch.float32)
        return max(wide, _measured_rate(device, dtype)) if processor.multiplies(dtype) else wide
    if dtype.itemsize == 1:
        return 2 * product_rate(device, torch.bfloat16)
    return _measured_rate(device, dtype)


def _measured_rate(device: str, dtype: torch.dtype) -> float:
    width, generator = _WIDTH.get(device, _WIDTH["cuda"]), torch.Generator(device).manual_seed(0)
    a, b = torch.randn(2, width, width, device=device, generator=generator).to(dtype)
    return 2 * width**3 / _median(device, lambda: torch.mm(a, b))


def memory_rate(device: str) -> float:
    """Bytes read and written in a second by a large copy, as measured now."""
    count = _COPIED.get(device, _COPIED["cuda"])
    source, target = torch.zeros(2, count, dtype=torch.uint8, device=device)
    return 2 * count / _median(device, lambda: target.copy_(source))


def _median(device: str, call: Callable[[], object]) -> float:
    """Seconds of one call; the first, which warms up, left out."""
    return statistics.median([time_call(device, call) for _ in range(6)][1:])
