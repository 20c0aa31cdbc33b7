"""What a factory must return, and what is said where it returns something else."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from ampcompile import explain
from ampcompile.command_line.bench import load
from ampcompile.errors import AmpWarning
from tests.command_line.conftest import FACTORIES


def test_lists_become_tuples_and_keywords_are_optional(shop: str) -> None:
    target = load(f"{shop}:function")
    assert isinstance(target.args, tuple) and target.args[0].shape == (4, 8) and target.kwargs == {"scale": 2.0}
    assert load(f"{shop}:model").kwargs == {} and isinstance(load(f"{shop}:model").f, torch.nn.Module)


def test_a_file_is_imported_with_the_packages_it_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / f"of_{tmp_path.name}" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "sizes.py").write_text("WIDTH = 8\n")
    (package / "shop.py").write_text(
        "import torch\nfrom .sizes import WIDTH\n\n"
        "def model(): return torch.nn.Linear(WIDTH, 2), (torch.ones(1, WIDTH),)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load(f"{package.relative_to(tmp_path)}/shop.py:model").args[0].shape == (1, 8)


def test_warnings_name_the_file_of_the_factory(shop: str, tmp_path: Path) -> None:
    target = load(f"{shop}:model")
    with pytest.warns(AmpWarning, match="pattern 'sofmax' matches no op") as warned:
        target.call(partial(explain(target.f, policy="op sofmax=fp32"), *target.args))
    line = 1 + FACTORIES.splitlines().index(next(line for line in FACTORIES.splitlines() if "def model()" in line))
    said = {(w.filename, w.lineno) for w in warned if issubclass(w.category, AmpWarning)}
    assert said == {(str(tmp_path / f"{shop}.py"), line)}
