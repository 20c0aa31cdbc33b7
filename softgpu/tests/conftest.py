"""These tests run on the made-up GPU, whichever is there; each draws its numbers from its name."""

import os
import zlib
from collections.abc import Iterator

import pytest

from softgpu import choice

os.environ.setdefault(choice.NAME, choice.MADE_UP)
choice.choose()  # before a test imports torch


@pytest.fixture(autouse=True)
def isolated(request: pytest.FixtureRequest) -> Iterator[None]:
    import torch

    torch.manual_seed(zlib.crc32(request.node.name.encode()))
    yield
    torch.cuda.synchronize()  # what a test leaves running hinders no other
