"""Triton is asked once whether it works; where it doesn't, that is said once."""

import logging
import sys
from collections.abc import Iterator

import pytest
import torch

from ampcompile.kernels import usable


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    usable.usable.cache_clear()
    yield
    usable.usable.cache_clear()


def test_without_a_gpu_an_import_is_enough() -> None:
    assert usable.usable()
    assert torch.cuda.is_available() or usable.memory_of(torch.device("cuda")) == 0


def test_what_is_broken_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "ampcompile.kernels.triton", None)
    with caplog.at_level(logging.WARNING, "ampcompile"):
        assert not usable.usable() and not usable.usable()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "Triton kernels can't be used, Inductor's own code is"
    ]
