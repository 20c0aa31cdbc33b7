"""A model in training, and the numbers that it must give: those of a model whose weights are cast at every call."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ampcompile
from benchmarks.numbers import modes, same_bits

SIZE = 24


class Model(nn.Module):
    """Linear layers, a norm, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE)
        self.second, self.head = nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[N, SIZE] to [N, 4]."""
        h = self.norm(self.first(x).relu())
        return self.head(self.second(self.second(h)) + x)


def batch() -> tuple[Tensor, Tensor]:
    """Inputs [8, SIZE] and targets [8, 4]."""
    return torch.randn(8, SIZE), torch.randn(8, 4)


def options(**more: Any) -> dict[str, Any]:
    """How the subject is compiled."""
    return {"lower": "aot_eager", **more}


class Subject:
    """`run` is the compiled model; `check` holds it against its twin."""

    def __init__(self, model: nn.Module | None = None, scaled: bool = True) -> None:
        self.before = modes()
        self.model: Any = Model() if model is None else model
        self.run: Any = torch.compile(self.model, backend="amp", options=options())
        self.twin = copy.deepcopy(self.model)
        self.plain = torch.compile(self.twin, backend="amp", options=options(weights="every_call"))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scaler = ampcompile.GradScaler("cpu", init_scale=8.0, enabled=scaled)

    def loss(self, run: Callable[[Tensor], Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        """Of one batch, through `run`."""
        return nn.functional.mse_loss(run(data[0]), data[1])

    def backward(self, data: tuple[Tensor, Tensor]) -> None:
        """Scaled gradients of one batch."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(self.run, data)).backward()

    def update(self) -> None:
        """Run the part of a step that follows backward."""
        self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train(self, steps: int = 1) -> None:
        """Whole steps."""
        for _ in range(steps):
            self.backward(batch())
            self.update()

    def check(self) -> None:
        """Outputs and gradients have the bits of the twin's, with and without autograd, and torch is as it was."""
        self.twin.load_state_dict(self.model.state_dict())
        data = batch()
        for run, plain in ((self.run, self.plain),) * 2:  # the second call finds copies of the first
            with torch.no_grad():
                with torch.autocast("cpu", torch.bfloat16):
                    eager = self.model(data[0]).float()
                assert same_bits([run(data[0]), plain(data[0])], [eager, eager]), "output without autograd"
            ours = torch.autograd.grad(self.loss(run, data), [*self.model.parameters()])
            theirs = torch.autograd.grad(self.loss(plain, data), [*self.twin.parameters()])
            assert same_bits(ours, theirs), "gradients"
        changed = {name: (was, now) for name, now in modes().items() if now != (was := self.before[name])}
        assert not changed, f"torch's modes (before, after): {changed}"

    def check_step(self) -> None:
        """The next step changes weights as torch's optimizer and scaler would, from the same state."""
        other = copy.deepcopy(self.model)
        optimizer = torch.optim.AdamW(other.parameters())
        optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        data = batch()
        self.backward(data)
        for ours, theirs in zip(self.model.parameters(), other.parameters(), strict=True):
            assert ours.grad is not None
            theirs.grad = ours.grad / self.scaler.get_scale()
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        optimizer.step()
        self.update()
        for ours, theirs in zip(self.model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        self.check()


def nothing_left() -> None:
    """Without models, no copy is left, and none of the replacements that copies need."""
    torch._dynamo.reset()
    gc.collect()
    assert ampcompile.weight_stats().copies == 0, ampcompile.weight_stats()
    assert "data" not in vars(torch.Tensor), "Tensor.data is still watched"
