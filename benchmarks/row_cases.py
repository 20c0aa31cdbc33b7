"""Norms between 16-bit layers: our kernels, Inductor's and Liger-Kernel's, and the bytes to be moved."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ampcompile.kernels.group_norm import group_norm
from ampcompile.kernels.norm import norm
from benchmarks.kernel_cases import COMPILED, LIGER, Kernel, differentiated, trained
from benchmarks.peers import AMP, liger_unusable

LOW = torch.bfloat16
Results = Sequence[Tensor]


def norm_kernels(device: str) -> Iterator[Kernel]:
    """A layer norm, an RMS norm behind a residual addition, a group norm before SiLU; forward and backward."""
    rows, width = (512, 512) if device == "cpu" else (8192, 4096)
    x, residual = (torch.randn(rows, width, device=device, dtype=LOW, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(width, device=device, requires_grad=True) for _ in range(2))

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Results:
        return [torch.nn.functional.layer_norm(x.float(), (width,), weight, bias).to(LOW)]

    def our_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Results:
        return norm(x, None, weight, bias, width, 1e-5, True, False, False, LOW, 1)[2:]

    def added(x: Tensor, residual: Tensor, weight: Tensor) -> Results:
        h = x + residual
        return [h, (torch.nn.functional.rms_norm(h.float(), (width,), weight, 1e-6)).to(LOW)]

    def our_added(x: Tensor, residual: Tensor, weight: Tensor) -> Results:
        return norm(x, residual, weight, None, width, 1e-6, False, False, False, LOW, 1)[1:]

    # Forward reads x and writes the result; backward reads x and the gradient, and writes one.
    yield _case("layer norm", 10 * x.numel(), 24 * x.numel(), (x, weight, bias), layer, our_layer, _liger_layer)
    # Forward reads x and the residual, writes sum and result; backward reads sum and two gradients, and writes one.
    given = x, residual, weight
    yield _case("RMS norm of a sum", 16 * x.numel(), 24 * x.numel(), given, added, our_added, _liger_added)
    yield _group_norm(device)


def _group_norm(device: str) -> Kernel:
    """As in a UNet: 32 groups, SiLU behind."""
    shape = (2, 64, 16, 16) if device == "cpu" else (16, 320, 64, 64)
    x = torch.randn(shape, device=device, dtype=LOW, requires_grad=True)
    weight, bias = (torch.randn(shape[1], device=device, requires_grad=True) for _ in range(2))

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Results:
        return [torch.nn.functional.silu(torch.nn.functional.group_norm(x.float(), 32, weight, bias)).to(LOW)]

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Results:
        return group_norm(x, None, weight, bias, 32, 1e-5, True, False, False, LOW, 1)[2:]

    # Forward reads x and writes the result; backward reads x and the gradient, and writes one.
    return _case("group norm and SiLU", 10 * x.numel(), 37 * x.numel(), (x, weight, bias), plain, ours, _liger_groups)


def _case(
    name: str,
    moved: int,
    flops: int,
    given: tuple[Tensor, ...],
    plain: Callable[..., Results],
    ours: Callable[..., Results],
    theirs: Callable[[], Callable[..., Results]],
) -> Kernel:
    gradients = [torch.randn_like(result) for result in plain(*given)]
    candidates = {COMPILED: trained(plain, given, gradients), AMP: trained(ours, given, gradients)}
    why = liger_unusable(given[0].device.type)
    if why is None:
        try:
            candidates[LIGER] = differentiated(theirs(), given, gradients)
        except ImportError as error:  # an older release has fewer kernels
            why = str(error)
    return Kernel(name, moved, flops, candidates, {LIGER: why} if why else {})


def _liger_layer() -> Callable[..., Results]:
    from liger_kernel.transformers.functional import liger_layer_norm

    return lambda x, weight, bias: [liger_layer_norm(x, weight, bias, 1e-5)]


def _liger_added() -> Callable[..., Results]:
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    return lambda x, residual, weight: liger_fused_add_rms_norm(x, residual, weight, 1e-6, in_place=False)[::-1]


def _liger_groups() -> Callable[..., Results]:
    """Its group norm knows no SiLU, and wants a channel's places in one dimension."""
    from liger_kernel.transformers.functional import liger_group_norm

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Results:
        normed = liger_group_norm(x.flatten(2), weight, bias, x.shape[1], 32, 1e-5)
        return [torch.nn.functional.silu(normed).view(x.shape)]

    return run
