"""Which layers of Linear, Linear, Softmax run in what, and why?

python -m examples.steering.softmax_layers
"""

import torch
from torch import nn

import ampcompile
from ampcompile.insight.report import Report


def layers() -> nn.Module:
    """The three layers; nothing in them knows about precision."""
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10), nn.Softmax(-1))


def by_default() -> Report:
    """On a CPU autocast knows no rule for softmax: it runs in what arrives, bfloat16. On CUDA it runs in float32."""
    return ampcompile.explain(layers())(torch.randn(8, 64))


def softmax_in_float32() -> Report:
    """One rule changes that."""
    return ampcompile.explain(layers(), policy="op softmax=fp32")(torch.randn(8, 64))


def main() -> None:
    """Prints each layer's dtype and the reason, by default and with the rule."""
    for report in (by_default(), softmax_in_float32()):
        for op in report.ops:
            print(f"{op.module}: {op.op} in {op.dtype}: {op.because}")
        print()


if __name__ == "__main__":
    main()
