"""Many weights and next to no arithmetic: what a call costs for each weight it uses."""

from torch import Tensor, nn


class TinyLinears(nn.Module):
    """`count` linear layers of 16 features, one after the other; input and output are (batch, 16)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x
