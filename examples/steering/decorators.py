"""A class, an object, a function and a block, each kept in float32 or put into low precision.

python -m examples.steering.decorators
"""

import torch
from torch import Tensor, nn

import ampcompile
from ampcompile import keep_fp32, precision
from ampcompile.insight.report import Report


@keep_fp32
class Energy(nn.Module):
    """A class: all its objects run in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@keep_fp32
def distances(x: Tensor, y: Tensor) -> Tensor:
    """A function: its product runs in float32."""
    return x @ y.mT


class Model(nn.Module):
    """One of each."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Energy()
        self.kept = keep_fp32(nn.Linear(8, 8))  # an object
        self.sixteen = precision(torch.float16)(nn.Linear(8, 8))
        self.plain = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain(self.kept(self.sixteen(self.energy(x))))
        with precision(torch.float32):  # a block
            x = x @ x.mT
        return distances(x, x)


def explained() -> Report:
    """What runs in what."""
    return ampcompile.explain(Model())(torch.randn(4, 8))


def main() -> None:
    """Prints the dtype of every product."""
    for op in explained().ops:
        if op.op in ("aten.linear", "aten.matmul"):
            print(f"{op.module or 'Model'} line {op.source.rpartition(':')[2]}: {op.op} in {op.dtype}")


if __name__ == "__main__":
    main()
