"""Cross entropy of 16-bit logits, alone and with the layer before it: our kernels, Inductor's, Liger-Kernel's."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ampcompile.kernels.cross_entropy import cross_entropy
from ampcompile.kernels.linear_cross_entropy import linear_cross_entropy
from benchmarks.kernel_cases import COMPILED, LIGER, Kernel, differentiated, trained
from benchmarks.peers import AMP, liger_unusable

LOW = torch.bfloat16


def loss_kernels(device: str) -> Iterator[Kernel]:
    """Forward and backward, with the vocabulary of GPT-2, whose rows begin anywhere in memory."""
    rows, features, classes = (256, 64, 1009) if device == "cpu" else (8192, 1024, 50257)
    target = torch.randint(classes, (rows,), device=device)
    logits = torch.randn(rows, classes, device=device, dtype=LOW, requires_grad=True)

    def plain(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), target)

    def ours(logits: Tensor) -> Tensor:
        return cross_entropy(logits, target)[0]

    # Forward reads the logits; backward reads them again and writes their gradient.
    yield _case("cross entropy", 6 * logits.numel(), 9 * logits.numel(), [logits], plain, ours, _liger(target))
    del logits
    x = torch.randn(rows, features, device=device, dtype=LOW, requires_grad=True)
    weight = torch.randn(classes, features, device=device, requires_grad=True)

    def plain_layer(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight.to(LOW)).float(), target)

    def our_layer(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, None, weight.detach().to(LOW), None, target)[0]

    # Logits need never be in memory: x and the weight are read forward and twice backward, their gradients written.
    moved = 8 * x.numel() + 16 * weight.numel()
    flops = 6 * rows * weight.numel()
    yield _case("linear layer, cross entropy", moved, flops, [x, weight], plain_layer, our_layer, _liger_layer(target))


def _case(
    name: str,
    moved: int,
    flops: int,
    given: list[Tensor],
    plain: Callable[..., Tensor],
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
) -> Kernel:
    candidates = {COMPILED: trained(plain, given), AMP: trained(ours, given)}
    why = liger_unusable(given[0].device.type)
    if why is None:  # it writes over the logits in forward: tensors of its own
        candidates[LIGER] = differentiated(theirs, [tensor.detach().clone().requires_grad_() for tensor in given])
    return Kernel(name, moved, flops, candidates, {LIGER: why} if why else {})


def _liger(target: Tensor) -> Callable[[Tensor], Tensor]:
    def run(logits: Tensor) -> Tensor:
        from liger_kernel.transformers.functional import liger_cross_entropy

        return liger_cross_entropy(logits, target)

    return run


def _liger_layer(target: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return liger_fused_linear_cross_entropy(x, weight.to(LOW), target)

    return run
