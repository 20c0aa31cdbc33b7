"""The backward of attention on the CPU: ours, torch's flash kernel, and whole products compiled by Inductor."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ampcompile.kernels import attention_backward as ours
from benchmarks.kernel_cases import COMPILED, Kernel
from benchmarks.peers import AMP

FLASH = "torch: flash"


def attention_kernels() -> Iterator[Kernel]:
    """Causal attention of GPTs, 64 features a head, in bfloat16: as short as in the training step here, and longer."""
    for batch, tokens in ((4, 128), (1, 1024)):
        heads, features = 8, 64
        q, k, v, grad = torch.randn(4, batch, tokens, heads, features, dtype=torch.bfloat16).transpose(2, 3)
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        given = grad, q, k, v, out, logsumexp
        compiled = torch.compile(ours.attention_backward_reference)
        candidates: dict[str, Callable[[], object]] = {
            AMP: partial(ours.ATTENTION_BACKWARD, *given, None, True, 0.125),
            FLASH: partial(ours.FLASH_BACKWARD, *given, 0.0, True, scale=0.125),
            COMPILED: partial(compiled, *given, True, 0.125),
        }
        unable = {}
        if not ours.available():
            del candidates[AMP]
            unable[AMP] = "the kernel is one for AVX512-BF16 without AMX"
        # Reads q, k, v, the result and its gradient, writes three gradients; five products, half of each masked.
        moved, flops = 8 * q.numel() * q.itemsize, 5 * q.numel() * tokens
        yield Kernel(f"backward of attention, {batch}x{tokens}, {heads} heads", moved, flops, candidates, unable)
