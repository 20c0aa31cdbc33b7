"""The Python on the pages runs."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ampcompile
from tests import pages
from tests.test_layout import ROOT

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
ELSEWHERE = {"README.md", "docs/integrations.md", "docs/options.md"}
"""Pages whose Python runs in tests of their own, or needs more than the suite has."""


def training() -> dict[str, Any]:
    model = nn.Linear(4, 3)
    return {
        "ampcompile": ampcompile,
        "batches": [(torch.randn(5, 4), torch.randint(3, (5,)))],
        "compiled_model": torch.compile(model, backend="amp"),
        "loss_fn": nn.functional.cross_entropy,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
    }


class Writer:
    """As TensorBoard's writer: raises where it isn't given a number, or text."""

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert name and float(value) >= 0 and step >= 0

    def add_text(self, name: str, text: str, step: int) -> None:
        assert name and text and step >= 0


def watching() -> dict[str, Any]:
    scaler = ampcompile.GradScaler("cpu")
    given = training()
    return given | {"torch": torch, "network": given["model"], "scaler": scaler, "writer": Writer(), "step": 1}


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/audit.md": watching,
    "docs/captured_steps.md": lambda: watching() | {"lightning": SimpleNamespace(LightningModule=nn.Module)},
    "docs/explain.md": lambda: watching() | {"x": torch.randn(2, 4)},
    "docs/optimizer.md": training,
    "docs/scaler.md": training,
    "docs/weights.md": lambda: {
        "torch": torch,
        "ampcompile": ampcompile,
        "model": nn.Linear(4, 4),
        "x": torch.ones(2, 4),
    },
}
"""What a page's Python takes for granted."""


LONG = {"docs/migration.md", "docs/audit.md", "docs/captured_steps.md", "docs/memory.md"}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.ci if page in LONG else ()) for page in PAGES if page not in ELSEWHERE],
)
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pages.run(page, **GIVEN[page]() if page in GIVEN else {})
