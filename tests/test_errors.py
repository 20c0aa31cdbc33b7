"""Warnings stand at the user's line, however deep in ours and torch's code they come up."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ampcompile.errors import AmpWarning
from ampcompile.passes.decide import fp8
from tests.test_layout import SOURCES


@pytest.fixture(autouse=True)
def said_nothing_yet() -> None:
    fp8._warn_of_device.cache_clear()


def compiled(f: Any, **options: Any) -> Any:
    return torch.compile(f, backend="amp", options={"lower": "aot_eager", **options})


def in_two() -> nn.Module:
    model = nn.Linear(4, 4)
    for name, param in [*model.named_parameters()]:
        setattr(model, name, nn.Parameter(TwoTensor(param.detach(), param.detach().clone())))
    return model


def numbers() -> Iterator[int]:
    yield 1


X = torch.ones(16, 16)
WARNS: dict[str, Callable[[], object]] = {
    "asks for fp8": lambda: compiled(nn.Linear(16, 16), policy="module *=fp8")(X),
    "left to autocast": lambda: compiled(in_two(), policy="op linear=fp32")(X[:, :4]),
    "matches no op": lambda: compiled(nn.ReLU(), policy="op linear=fp32")(X),
    "generator function": lambda: compiled(numbers),
}


@pytest.mark.parametrize("words", WARNS)
def test_a_warning_stands_at_the_users_line(words: str) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        WARNS[words]()
    (told,) = [each for each in found if words in str(each.message)]
    assert issubclass(told.category, AmpWarning) and told.filename == __file__


def test_one_function_finds_that_line() -> None:
    callers = {module for module, path in SOURCES.items() if "warnings.warn" in path.read_text()}
    assert callers == {"ampcompile.errors"}
