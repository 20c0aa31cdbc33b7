"""Everyday situations leave the copies of a model's weights fresh without a comparison, but for those named."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.weights.bindings import bind, comparisons


class Block(nn.Module):
    """Embeddings tied to a head, attention, a convolution and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.attention = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.conv = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.attention(self.norm(self.tokens(x)))
        return self.head(hidden).float().square().mean() + self.conv(hidden[:, None]).square().mean()


class Case:
    def __init__(self, folder: Path) -> None:
        self.model, self.x, self.folder, self.kept = Block(), torch.randint(0, 50, (2, 8)), folder, list[Any]()
        self.steps: list[torch.optim.Optimizer] = []

    def train(self, **options: Any) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, **options)
        self.model(self.x).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        self.kept.append(optimizer)

    def state(self) -> dict[str, Tensor]:
        return copy.deepcopy(self.model.state_dict())

    def saved(self) -> Path:
        torch.save(self.model.state_dict(), self.folder / "model.pt")
        return self.folder / "model.pt"


def averaged(case: Case) -> None:
    case.kept.append(torch.optim.swa_utils.AveragedModel(case.model))
    case.kept[-1].update_parameters(case.model)


def through_a_vector(case: Case) -> None:
    vector = nn.utils.parameters_to_vector(case.model.parameters())
    nn.utils.vector_to_parameters(vector.detach().clone(), case.model.parameters())


def from_arrays(case: Case) -> None:
    state = {name: torch.from_numpy(value.numpy().copy()) for name, value in case.state().items()}
    case.model.load_state_dict(state, assign=True)
    case.kept.append(state)


SITUATIONS: dict[str, Callable[[Case], object]] = {
    "a new model": lambda case: None,
    "trained eagerly": Case.train,
    "trained by a fused optimizer": lambda case: case.train(fused=True),
    "trained by a foreach optimizer": lambda case: case.train(foreach=True),
    "a backward done": lambda case: case.model(case.x).backward(),
    "its result kept": lambda case: case.kept.append(case.model.head(torch.randn(2, 32)).detach()),
    "a state dict kept": lambda case: case.kept.append(case.model.state_dict()),
    "a state dict loaded": lambda case: case.model.load_state_dict(case.state()),
    "assigned": lambda case: case.model.load_state_dict(case.state(), assign=True),
    "assigned, and the state kept": lambda case: case.model.load_state_dict(
        case.kept.append(case.state()) or case.kept[-1], assign=True
    ),
    "mapped from a file": lambda case: case.model.load_state_dict(torch.load(case.saved(), mmap=True), assign=True),
    "saved": Case.saved,
    "made of arrays, and these kept": from_arrays,
    "to another type and back": lambda case: case.model.double().float(),
    "deep copied": lambda case: case.kept.append(copy.deepcopy(case.model)),
    "an averaged model": averaged,
    "gradients clipped": lambda case: nn.utils.clip_grad_norm_(case.model.parameters(), 1.0),
    "a vector of all": lambda case: case.kept.append(nn.utils.parameters_to_vector(case.model.parameters())),
    "views of one vector": through_a_vector,
    "shared memory": lambda case: case.model.share_memory(),
    "eval": lambda case: case.model.eval(),
    "frozen": lambda case: case.model.requires_grad_(False),
    "moved to where it is": lambda case: case.model.to("cpu"),
    "clones written": lambda case: [p.data.clone().add_(1) for p in case.model.parameters()],
    "views kept": lambda case: case.kept.extend(p.detach()[0] for p in case.model.parameters()),
    "a backward to come": lambda case: case.kept.append(case.model(case.x)),
    "a list of .data kept": lambda case: case.kept.append([p.data for p in case.model.parameters()]),
    "functional calls": lambda case: torch.func.functional_call(
        case.model, {name: p.detach() for name, p in case.model.named_parameters()}, (case.x,)
    ),
}
COMPARED = {"a list of .data kept"}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_nothing_is_compared_in_steady_state(situation: str, tmp_path: Path) -> None:
    case = Case(tmp_path)
    SITUATIONS[situation](case)
    gc.collect()
    weights = [p for p in case.model.parameters() if p.dim() > 1]
    others = [p for p in case.model.parameters() if p.dim() < 2]  # that the graph reads in float32
    binding = bind([torch.bfloat16] * len(weights))
    for _ in range(2):
        binding.copies([*weights, *others])
    compared = comparisons(lambda: [binding.copies([*weights, *others]) for _ in range(3)])
    assert bool(compared) == (situation in COMPARED)
    for read, weight in zip(binding.copies([*weights, *others]), weights, strict=True):
        assert torch.equal(read, weight.detach().bfloat16())
