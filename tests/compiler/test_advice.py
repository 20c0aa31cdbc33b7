"""Training in float16 without a scaler is warned of, once."""

import gc
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import ampcompile
from ampcompile.compiler import backend


@pytest.fixture
def looking_anew() -> Iterator[None]:
    """As in a process that has no scaler yet: those of other tests are gone."""
    gc.collect()
    backend._look_for_a_scaler.cache_clear()
    yield
    backend._look_for_a_scaler.cache_clear()


def trained(caplog: pytest.LogCaptureFixture, **changes: Any) -> list[str]:
    """What is said when a graph is compiled, of training in float16 but for the changes."""
    how = {"dtype": torch.float16, "grad": True, "autocast": True, **changes}
    model = nn.Linear(4, 4)
    run = torch.compile(model, backend="amp", options={"lower": "eager", "dtype": how["dtype"]})
    caplog.clear()
    with torch.set_grad_enabled(how["grad"]), torch.autocast("cpu", enabled=False) if not how["autocast"] else ON:
        run(torch.randn(2, 4))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [line for line in said if "GradScaler" in line]


ON = nullcontext()
SCALERS = [torch.amp.GradScaler, ampcompile.GradScaler]


@pytest.mark.usefixtures("looking_anew")
@pytest.mark.filterwarnings("ignore:.* runs in float32:ampcompile.AmpWarning")
def test_training_in_float16_without_a_scaler_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    assert not trained(caplog, dtype=torch.bfloat16) and not trained(caplog, grad=False)
    assert not trained(caplog, autocast=False)
    (line,) = trained(caplog)
    assert line.startswith("ampcompile: a graph trains in float16 on cpu, and no GradScaler has been made")
    assert not trained(caplog)


@pytest.mark.usefixtures("looking_anew")
@pytest.mark.parametrize("kind", SCALERS, ids=["torch", "ours"])
def test_with_a_scaler_of_either_kind_there_is_nothing_to_warn_of(
    kind: type[torch.amp.GradScaler], caplog: pytest.LogCaptureFixture
) -> None:
    scaler = kind("cpu")
    assert not trained(caplog)
    del scaler
