"""What a factory must return, and what is said where it returns something else."""

import sys
from pathlib import Path

import pytest
import torch

from ampcompile.command_line.target import load
from ampcompile.errors import CommandLineError


def test_lists_become_tuples_and_keywords_are_optional(shop: str) -> None:
    target = load(f"{shop}:function")
    assert isinstance(target.args, tuple) and target.args[0].shape == (4, 8) and target.kwargs == {"scale": 2.0}
    assert load(f"{shop}:model").kwargs == {} and isinstance(load(f"{shop}:model").f, torch.nn.Module)


@pytest.mark.parametrize(
    ("factory", "found"),
    [
        ("number", "returned a int; "),
        ("four", "returned a tuple of 4; "),
        ("not_callable", "returned a int as model; "),
        ("one_tensor", "returned a Tensor as args; "),
        ("no_keywords", "returned a list as kwargs; "),
    ],
)
def test_the_error_says_what_was_found_and_expected(shop: str, factory: str, found: str) -> None:
    with pytest.raises(CommandLineError) as error:
        load(f"{shop}:{factory}")
    assert str(error.value).startswith(f"{shop}:{factory} {found}expected (model, args) or (model, args, kwargs)")


def test_other_spellings_are_refused_and_other_errors_go_through(shop: str) -> None:
    for spelling in ("shop", ":model", "shop:"):
        with pytest.raises(CommandLineError, match=r"expected PACKAGE\.MODULE:FACTORY or FILE\.py:FACTORY"):
            load(spelling)
    with pytest.raises(CommandLineError, match="found no module 'no_such_module'; expected one"):
        load("no_such_module.inside:model")
    with pytest.raises(ZeroDivisionError, match="the factory's own"):
        load(f"{shop}:breaks")
    with pytest.raises(
        CommandLineError, match=r"is a Linear; expected a function without arguments that returns \(model"
    ):
        load(f"{shop}:instance")


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
    with pytest.raises(CommandLineError, match=r"found no file shop\.py; expected a Python file"):
        load("shop.py:model")


def test_a_module_that_the_target_imports_and_that_is_missing_is_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "missing_parts.py").write_text("import missing\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ModuleNotFoundError, match="No module named 'missing'"):
        load("missing_parts:model")


def test_factories_with_arguments_and_calls_that_raise_are_said_in_a_line(shop: str) -> None:
    with pytest.raises(CommandLineError, match=r"needs_arguments can't be called without arguments \(missing a requ"):
        load(f"{shop}:needs_arguments")
    with pytest.raises(
        CommandLineError, match=r"wrong_shape returned a model that raises RuntimeError .* mat1"
    ) as error:
        load(f"{shop}:wrong_shape")
    assert "\n" not in str(error.value)
