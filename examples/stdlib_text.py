"""The source text of the Python standard library, as bytes to train on."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def read(limit: int = 16_000_000) -> tuple[Tensor, Tensor]:
    """Training and validation text, uint8 (bytes,), from disjoint files; at most `limit` bytes are read."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in library.rglob("*.py") if not LEFT_OUT & set(path.relative_to(library).parts))
    train, validation = bytearray(), bytearray()
    for index, path in enumerate(files):
        (validation if index % 10 == 0 else train).extend(path.read_bytes())
        if len(train) + len(validation) > limit:
            break
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(validation, dtype=torch.uint8)


def batch(text: Tensor, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random passages and, one byte later, what follows each byte: two int64 (size, length)."""
    starts = torch.randint(len(text) - length, (size, 1), generator=generator)
    passages = text[starts + torch.arange(length + 1)].long()
    return passages[:, :-1], passages[:, 1:]
