"""A linear layer and the cross entropy of its 16-bit logits: our kernel, Inductor's code, Liger-Kernel's."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ampcompile.kernels.linear_cross_entropy import linear_cross_entropy
from benchmarks.kernel_cases import COMPILED, LIGER, Kernel, differentiated, trained
from benchmarks.peers import AMP, liger_unusable

LOW = torch.bfloat16


def loss_kernels(device: str) -> Iterator[Kernel]:
    """Forward and backward, with the vocabulary of GPT-2, whose rows begin anywhere in memory."""
    rows, features, classes = (256, 64, 1009) if device == "cpu" else (8192, 1024, 50257)
    target = torch.randint(classes, (rows,), device=device)
    x = torch.randn(rows, features, device=device, dtype=LOW, requires_grad=True)
    weight = torch.randn(classes, features, device=device, requires_grad=True)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight.to(LOW)).float(), target)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, None, weight.detach().to(LOW), None, target)[0]

    # Logits need never be in memory: x and the weight are read forward and twice backward, their gradients written.
    moved = 8 * x.numel() + 16 * weight.numel()
    flops = 6 * rows * weight.numel()
    candidates = {COMPILED: trained(plain, [x, weight]), AMP: trained(ours, [x, weight])}
    why = liger_unusable(device)
    if why is None:  # it writes over the logits in forward: tensors of its own
        candidates[LIGER] = differentiated(_liger(target), [t.detach().clone().requires_grad_() for t in (x, weight)])
    yield Kernel("linear layer, cross entropy", moved, flops, candidates, {LIGER: why} if why else {})


def _liger(target: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return liger_fused_linear_cross_entropy(x, weight.to(LOW), target)

    return run
