"""The next compiled call after every known way to write a weight gives what eager autocast gives."""

import contextlib

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ampcompile.weights import weight_stats
from ampcompile.weights.copies import TRIAL
from tests.weights.writers import EXACT, SAMPLED, Net

MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad}


def forward(net: Net, x: Tensor, image: Tensor) -> tuple[Tensor, ...]:
    return (
        F.linear(x, net.linear.weight),
        F.conv2d(image, net.conv.weight),
        x[:, :20] @ net.transposed.t(),
        x[:, :16] @ net.frozen,
        F.linear(x[:, :4], net.table),
    )


def compiled_net(lower: str, mode: str, writer: str) -> Net:
    """A net whose `look()` calls it and compares with eager autocast, which keeps no cast here."""
    net, cached = Net(writer), torch.compile(forward, backend="amp", options={"lower": lower})

    def look() -> None:
        x, image = torch.randn(3, 24), torch.randn(1, 3, 5, 5)
        with MODES[mode]():
            found = cached(net, x, image)
            with torch.autocast("cpu", cache_enabled=False):
                expected = forward(net, x, image)
        for ours, eagers in zip(found, expected, strict=True):
            # Inductor's convolutions may round otherwise than eager's; a write changes a weight by 1 or more.
            assert torch.allclose(ours, eagers.float(), *([2**-7, 2**-7] if lower == "inductor" else [0, 0]))

    net.look = look
    look()
    return net


@pytest.mark.parametrize(
    ("lower", "mode"),
    [
        ("aot_eager", "grad"),
        pytest.param("aot_eager", "no_grad", marks=pytest.mark.slow),
        pytest.param("inductor", "grad", marks=pytest.mark.slow),
        pytest.param("inductor", "no_grad", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("writer", [*EXACT, *SAMPLED])
def test_the_next_call_sees_the_write(writer: str, lower: str, mode: str) -> None:
    net = compiled_net(lower, mode, writer)
    before = [weight.detach().clone() for weight in net.weights()]
    {**EXACT, **SAMPLED}[writer](net)
    net.look()
    assert not all(map(torch.equal, before, net.weights())), "the writer wrote nothing"
    for _ in range(TRIAL):  # some writers leave a plain attribute in the place of a parameter
        net.look()
    casts = weight_stats().casts
    net.look()
    assert weight_stats().casts == casts, "nothing was written in between"
