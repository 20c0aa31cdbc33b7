"""Published measurements on an H100, repeated: how far this machine and this clock agree with theirs.

The published figures, and where they are from, stand in docs/gpu_decisions.md.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.architectures import build
from benchmarks.kernel_cases import Kernel, compiled, differentiated, trained
from benchmarks.peers import AMP, PEERS, unusable

LOW = torch.bfloat16
CONVERTED, CAST = "Inductor, bfloat16 weight", "Inductor, weight cast in each call"
FUSED, FLASH = "torch: fused", "FlashOptim: FlashAdamW"
FLEX = "flex attention, {}"


def linear_layer(device: str) -> Iterator[Kernel]:
    """nanochat's widest layer at depth 26: its own Linear casts the float32 weight in each call."""
    rows, features, outputs = (64, 32, 48) if device == "cpu" else (65536, 1664, 6656)
    layer = nn.Linear(features, outputs, bias=False, device=device)
    weight, low = layer.weight, layer.weight.detach().to(LOW).requires_grad_()
    ours = PEERS[AMP].compiled(layer, LOW)
    x, grad = (torch.randn(rows, width, device=device, dtype=LOW) for width in (features, outputs))

    def cast(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight.to(x.dtype))

    def without_gradients() -> Tensor:
        with torch.no_grad():
            return ours(x)

    moved, flops = 2 * rows * (features + outputs) + 4 * outputs * features, 2 * rows * features * outputs
    forward = {CONVERTED: compiled(F.linear, x, low.detach()), CAST: compiled(cast, x, weight.detach())}
    yield Kernel("linear layer", moved, flops, {**forward, AMP: without_gradients})
    wide = x.clone().requires_grad_()
    # The source doesn't say whether its backward has the gradient of the input too.
    for what, given, times in (("", x, 2), (", its input's gradient too", wide, 3)):
        inputs = [given] if given.requires_grad else []
        candidates = {
            CONVERTED: trained(F.linear, [given, low], grad, [*inputs, low]),
            CAST: trained(cast, [given, weight], grad, [*inputs, weight]),
            AMP: differentiated(ours, [given], grad, [*inputs, weight]),
        }
        yield Kernel(f"linear layer, forward and backward{what}", times * moved, times * flops, candidates)


def adamw(device: str) -> Iterator[Kernel]:
    """A step on the weights of a GPT: torch's, in float32, and FlashOptim's, on 24 bits a weight and 16 of state."""
    params = [
        p.detach().to(device)
        for p in build("tiny GPT 23M" if device == "cpu" else "GPT 10x1024", 1, 1, False)[0].parameters()
    ]
    count = sum(p.numel() for p in params)
    candidates = {FUSED: _step(params, torch.optim.AdamW, fused=True)}
    why = unusable("flashoptim", "flashoptim")
    if why is None:
        candidates[FLASH] = _step([p.to(LOW) for p in params], importlib.import_module("flashoptim").FlashAdamW)
    yield Kernel("AdamW", 28 * count, 16 * count, candidates, {FLASH: why} if why else {})


def _step(params: list[Tensor], kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[], object]:
    weights = [p.clone().requires_grad_() for p in params]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return kind(weights, lr=3e-4, **options).step


def attention(device: str) -> Iterator[Kernel]:
    """OmniVoice's attention: 16 heads of 128 features on 8 of keys, 8192 packed tokens, backward in two types."""
    heads, tokens, features, document = (2, 64, 16, 32) if device == "cpu" else (16, 8192, 128, 512)
    shapes = [(1, heads, tokens, features), *[(1, heads // 2, tokens, features)] * 2]
    wide = [torch.randn(shape, device=device) for shape in shapes]

    def together(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query // document == key // document

    mask = create_block_mask(together, None, None, tokens, tokens, device=device)
    attend = torch.compile(_attention_of(mask, document, device), dynamic=False)

    @cache
    @torch._functorch.config.patch(donated_buffer=False)  # else backward runs once only
    def forward(dtype: torch.dtype) -> tuple[Tensor, list[Tensor], Tensor]:
        given = [value.to(dtype).requires_grad_() for value in wide]
        out = attend(*given)
        return out, given, torch.randn_like(out)

    def backward(dtype: torch.dtype) -> object:
        out, given, grad = forward(dtype)
        return torch.autograd.grad(out, given, grad, retain_graph=True)

    dtypes = {FLEX.format(str(dtype).removeprefix("torch.")): dtype for dtype in (torch.float32, LOW)}
    candidates: dict[str, Callable[[], object]] = {n: partial(backward, dtype) for n, dtype in dtypes.items()}
    flops = 5 * 2 * heads * tokens * document * features
    moved = 2 * 4 * sum(value.numel() for value in wide)
    yield Kernel("backward of flex attention", moved, flops, candidates)


def _attention_of(mask: BlockMask, document: int, device: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """flex_attention, which has no backward on the CPU: there, the same by whole products."""

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[-2]) // document
        return F.scaled_dot_product_attention(q, k, v, places[:, None] == places[None], enable_gqa=True)

    return whole if device == "cpu" else flex


CASES = (linear_layer, adamw, attention)
