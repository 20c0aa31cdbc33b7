"""Casts of one call, forward and backward, in ten architectures: how many, and the bytes they read and write.

python -m benchmarks.cast_table [NAME ...]     small configurations, on the CPU; eager kernels but for Inductor's column

"amp" and "bytes" count what is left after differentiation, with range guards off. "bound" is the minimum cut itself:
the casts before it, less what the cut takes away. In every column a cast inside a fused kernel counts like any other.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import ampcompile
from ampcompile.compiler.backend import rewrite
from ampcompile.config import Options
from ampcompile.passes.decide import place_casts
from benchmarks.architectures import build
from benchmarks.counting import CastsRun, casts_compiled

NAMES = ("GPT 23M", "GPT 2x64", "BERT", "ViT", "ResNet-50", "T5", "UNet", "64 weights", "MLP", "GQA")
SIDE = {"ViT": 32, "ResNet-50": 32, "UNet": 32}


@dataclass(frozen=True)
class Counted:
    """One architecture under one peer."""

    casts: int
    bytes: int


class MLP(nn.Module):
    """Gated, with RMS norms written by hand in float32, as language models have them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, 64), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            wide = x.float()
            normal = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
            x = x + self.down(nn.functional.silu(self.gate(normal)) * self.up(normal))
        return x.square().mean()


class GQA(nn.Module):
    """Attention whose keys and values, scaled in float32, are repeated for groups of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, 4, 8).transpose(1, 2)
        k = (self.k(x).float() * 0.5).view(batch, length, 1, 8).transpose(1, 2)
        k = k.expand(batch, 4, length, 8).reshape(batch, 4, length, 8)
        return nn.functional.scaled_dot_product_attention(q, k, k).square().mean()


def built(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A small model in training mode and its inputs; called it returns a loss or a result."""
    if name in ("MLP", "GQA"):
        torch.manual_seed(0)
        return (MLP() if name == "MLP" else GQA()), (torch.randn(2, 16, 32),)
    as_it_is = name[0].isdigit() or "x" in name
    return build(name if as_it_is else f"tiny {name}", 2, SIDE.get(name, 16), True)


def eager(name: str) -> Counted:
    """Eager autocast, watched as it runs."""
    model, inputs = built(name)
    with CastsRun() as run:
        with torch.autocast("cpu", torch.bfloat16):
            result = model(*inputs)
        result.float().sum().backward()
    return Counted(run.casts.count, run.casts.bytes)


def inductor(name: str) -> Counted:
    """The graphs that Inductor lowers under autocast, after all its passes."""
    model, inputs = built(name)
    torch._dynamo.reset()
    with casts_compiled() as casts, torch._inductor.config.patch(force_disable_caches=True):
        with torch.autocast("cpu", torch.bfloat16):
            result = torch.compile(model)(*inputs)
        result.float().sum().backward()
    return Counted(casts.count, casts.bytes)


def amp(name: str, placement: str) -> Counted:
    """Ours after differentiation."""
    model, inputs = built(name)
    torch._dynamo.reset()
    report = ampcompile.explain(model, placement=placement, range_guards=False)(*inputs)
    last = [graph.totals[-1] for graph in report.graphs]
    return Counted(sum(total.casts for total in last), sum(total.bytes for total in last))


def saved_by_cut(name: str) -> int:
    """Bytes that the minimum cut saves over eager autocast's places, by its own account."""
    model, inputs = built(name)
    torch._dynamo.reset()
    saved = 0
    cut = place_casts.Placement.cut

    def counting(placement: place_casts.Placement) -> Any:
        nonlocal saved
        labels = cut(placement)
        saved += placement.cost(placement.free) - placement.cost(labels)
        return labels

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        rewrite(gm, example_inputs, Options.parse({"placement": "bytes", "lower": "eager", "range_guards": False}))
        return gm

    backend.amp_options = lambda **_: Options.parse({"placement": "bytes"})  # type: ignore[attr-defined]
    place_casts.Placement.cut = counting  # type: ignore[method-assign, assignment]
    try:
        torch.compile(model, backend=backend)(*inputs)
    finally:
        place_casts.Placement.cut = cut  # type: ignore[method-assign]
    return saved


def main(names: Sequence[str]) -> None:
    """Print the table, each cell as casts / kilobytes."""
    print("| architecture | eager | Inductor | amp | amp, bytes | bound, kB |")
    print("|---|--:|--:|--:|--:|--:|")
    for name in names or NAMES:
        cells = [eager(name), inductor(name), amp(name, "eager"), amp(name, "bytes")]
        bound = cells[2].bytes - saved_by_cut(name)
        shown = " | ".join(f"{cell.casts} / {cell.bytes / 1e3:.1f}" for cell in cells)
        print(f"| {name} | {shown} | {bound / 1e3:.1f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
