"""Triton is asked once whether it works, and where it doesn't that is said once; kernels run where tensors are."""

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ampcompile.kernels import usable
from ampcompile.kernels.cross_entropy import row_sums
from ampcompile.kernels.linear_cross_entropy import linear_cross_entropy_backward


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


LOW = torch.bfloat16
X, LSE, TARGET = torch.ones(4, 6, dtype=LOW), torch.ones(2, 4), torch.zeros(4, dtype=torch.int64)
LAUNCHES: dict[str, Callable[[], object]] = {
    "cross_entropy.row_sums": lambda: row_sums(X, None, False),
    "cross_entropy.gradient_": lambda: linear_cross_entropy_backward(
        torch.ones(()), X, X, None, TARGET, None, LSE, "mean", -100, 0.0, 0.0, [True, False, False]
    ),
}


class LaunchedError(Exception):
    """Raised in place of a launch."""


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_kernel_is_launched_on_the_device_of_its_tensors(launch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    current = []

    @contextmanager
    def device(where: torch.device) -> Iterator[None]:
        current.append(where)
        yield
        current.pop()

    def launched(*_: object) -> None:
        raise LaunchedError(current[-1])

    module, name = launch.split(".")
    monkeypatch.setattr(importlib.import_module(f"ampcompile.kernels.triton.{module}"), name, launched)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    with pytest.raises(LaunchedError) as error:
        LAUNCHES[launch]()
    assert error.value.args == (X.device,)


def test_where_a_tensor_is_only_traced_no_device_is_asked_for() -> None:
    with FakeTensorMode(), usable.on_device_of(torch.empty(3, device="cuda")):
        pass
