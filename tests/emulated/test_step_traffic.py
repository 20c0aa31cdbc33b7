"""What a fused step moves, as the emulator counts it: the bytes that its docstring names, which are taken on paper."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ampcompile
from softgpu import choice
from softgpu.memory import Global
from tests.weights.bindings import bind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not choice.is_made_up(), reason="only the made-up GPU counts what its kernels read and write"),
]


class Counting(Global):
    """Adds up the bytes of all accesses; what several threads read at once counts once."""

    moved = 0

    def locate(self, run: Any, threads: Any, ins: Any, address: Any, size: int, how: Any) -> Any:
        Counting.moved += size * len(np.unique(address))
        return super().locate(run, threads, ins, address, size, how)


@pytest.mark.parametrize(
    ("masters", "states", "dtype", "moved", "launches"),
    [
        (None, "float32", None, 28, 2),
        (None, "float32", torch.bfloat16, 30, 2),
        (None, "float32", torch.float8_e4m3fn, 31, 3),
        (None, "8bit", torch.bfloat16, 22.25, 3),
        ("remainder8", "8bit", None, 14.4, 3),
    ],
    ids=["alone", "with copies in 16 bits", "with copies in 8 bits", "coded, with copies and clipping", "of 7.1 bytes"],
)
def test_a_step_moves_what_it_must(
    masters: str | None,
    states: str,
    dtype: torch.dtype | None,
    moved: float,
    launches: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from softgpu.device import launching

    made = {"device": "cuda", "dtype": torch.bfloat16 if masters else torch.float32}
    params = [nn.Parameter(torch.randn(256, 512, **made)) for _ in range(2)]
    optimizer = ampcompile.optim.AdamW(params, lr=1e-6, fused=True, masters=masters, states=states)
    binding = None if dtype is None else bind([dtype] * 2)
    names: list[str] = []
    launch = launching.Launcher.launch
    for turn in range(2):  # the first also makes state
        for param in params:
            param.grad = torch.randn_like(param)
        if binding is not None:
            binding.copies(params)
        if turn:
            monkeypatch.setattr(
                launching.Launcher, "memory", lambda *_: Counting([], launching.soft().blocks, races=False)
            )
            monkeypatch.setattr(
                launching.Launcher,
                "launch",
                lambda self, kernel, *more: names.append(kernel.name) or launch(self, kernel, *more),
            )
            Counting.moved = 0
        if states == "8bit":
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    assert len(names) == launches, names
    assert Counting.moved / sum(param.numel() for param in params) == pytest.approx(moved, rel=0.002)
