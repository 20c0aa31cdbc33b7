"""A weight in the memory of a buffer that the same call writes is read as it is after that."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiling import LOW


class Flat(nn.Module):
    """A weight that is a part of a buffer."""

    flat: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flat", torch.randn(80))
        self.weight = nn.Parameter(self.flat[8:72].view(8, 8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8] to [N, 8]."""
        self.flat[8:16].copy_(x[0])
        return F.linear(x, self.weight)


@pytest.mark.parametrize("lower", ["eager", "aot_eager"])
def test_a_weight_written_through_a_buffer_in_the_same_call(lower: str) -> None:
    model = Flat()
    run = torch.compile(model, backend="amp", options={"lower": lower})
    for _ in range(3):
        x = torch.randn(4, 8)
        with torch.no_grad():
            found = run(x)
            with torch.autocast("cpu", LOW, cache_enabled=False):
                assert torch.equal(found, model(x).float())
