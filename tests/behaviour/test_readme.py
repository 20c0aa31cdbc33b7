"""The README: its Python runs, and its loop gives the losses of the one it replaces."""

import re
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from tests import pages
from tests.test_layout import ROOT


@pytest.mark.ci
def test_its_python_runs_in_a_folder_of_its_own(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = pages.run("README.md")
    assert names["loss"].item() < 1 and names["loss"].dtype == torch.float32
    names["ampcompile"] = ampcompile
    answers = re.findall(r"^\| [a-z][^|`]+ \| (?:as ever, )?`([^`]+)`", (ROOT / "README.md").read_text(), re.MULTILINE)
    for line in answers:
        exec(line, names)
    assert len(answers) == 9 and capsys.readouterr().out.startswith("amp removes")
    assert names["program"].module()(names["x"]).isfinite().all() and names["compiled"](names["x"]).isfinite().all()


def test_the_loop_gives_the_losses_of_the_loop_it_replaces() -> None:
    (diff,) = (block.code for block in pages.blocks("README.md") if block.language == "diff")
    losses = {}
    for side in "-+":
        code = textwrap.dedent("\n".join(line[1:] for line in diff.splitlines() if line[0] in f" {side}"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        losses[side] = recorded = list[float]()

        def loss_fn(found: Tensor, y: Tensor, recorded: list[float] = recorded) -> Tensor:
            recorded.append((loss := nn.functional.cross_entropy(found.float(), y)).item())
            return loss

        names = {"torch": torch, "model": model, "loss_fn": loss_fn}
        names["batches"] = [(torch.randn(8, 16), torch.randint(4, (8,)))] * 20
        exec(code.replace('"cuda"', '"cpu"').replace("lr=1e-3", "lr=1e-2"), names)
    torch.testing.assert_close(losses["+"], losses["-"], rtol=0.02, atol=0)
    assert losses["+"][-1] < 0.5 * losses["+"][0]
