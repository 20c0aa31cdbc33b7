"""What is cast where in a model: inputs, weights and activations, one by one.

python -m examples.steering.all_casts
"""

import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.insight.report import Report


class Encoder(nn.Module):
    """A block of a transformer, small."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.project = nn.Linear(8, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, signal: Tensor) -> Tensor:
        x = self.project(signal)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + nn.functional.scaled_dot_product_attention(q, k, v)


def captured() -> Report:
    """The report of one call; norms are kept in float32, so that there are activations to cast."""
    model = torch.compile(Encoder(), backend="amp", options={"policy": "op layer_norm=fp32"})
    return ampcompile.explain(model)(torch.randn(2, 16, 8))


def main() -> None:
    """Prints a line per cast, then the same as a table, and writes the page."""
    report = captured()
    for cast in report.casts:
        place = f"{cast.module} ({cast.source.rpartition('/')[2]})"
        print(f"{cast.of:10} {cast.dtype_from} to {cast.dtype_to} for {cast.op} in {place}: {', '.join(cast.fate)}")
    print(report)


if __name__ == "__main__":
    main()
