"""The package as it is installed: the list of sub-packages is whole, and so is the wheel."""

import email
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import ampcompile
from tests.pages import blocks
from tests.test_layout import ROOT, SOURCES, imports
from tests.wheel import bare, build, copy_tracked

FOLDERS = {
    "ampcompile": ROOT / "ampcompile",
    "ampcompile/passes": ROOT / "passes",
    "ampcompile/kernels": ROOT / "kernels",
}


def installed_names() -> set[str]:
    """Every file of ours that a user gets, by its name in the wheel."""
    return {
        f"{inside}/{path.relative_to(folder)}"
        for inside, folder in FOLDERS.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_every_folder_with_python_files_is_a_listed_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {name.rpartition("/")[0].replace("/", ".") for name in installed_names() if name.endswith(".py")}
    assert sorted(listed) == sorted(found)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from what git tracks."""
    return zipfile.ZipFile(build(tmp_path_factory.mktemp("wheel")))


@pytest.mark.ci
def test_the_wheel_holds_every_file_and_no_other(wheel: zipfile.ZipFile) -> None:
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == installed_names()
    assert "ampcompile/py.typed" in wheel.namelist()


@pytest.mark.ci
def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    inside = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    about = email.message_from_bytes(wheel.read(inside))
    assert about["Version"] == ampcompile.__version__ and about["License-Expression"] == "BSD-3-Clause"
    assert about["Description-Content-Type"] == "text/markdown" and about.get_payload()
    entry_points = wheel.read(inside.replace("METADATA", "entry_points.txt")).decode()
    assert "[torch_dynamo_backends]\namp = ampcompile.backend:amp" in entry_points


@pytest.mark.slow  # CI runs `make wheel`, the first of them
def test_the_lines_of_the_readme_install_it_in_a_clone(tmp_path: Path) -> None:
    copy_tracked(clone := tmp_path / "clone")
    subprocess.run("git init -q && git add .", cwd=clone, shell=True, check=True, timeout=60)
    python = bare(tmp_path / "environment")
    (pip := python.with_name("pip")).write_text(f'#!/bin/sh\nexec "{python}" -m pip "$@"\n')
    pip.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{python.parent}:{os.environ['PATH']}", "MAKEFLAGS": f"PYTHON={sys.executable}"}
    environment |= {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"}  # torch and the others are there
    (block,) = blocks("README.md", "Install")
    how = {"cwd": clone, "env": environment, "capture_output": True, "text": True, "timeout": 1200}
    run = subprocess.run(["bash", "-ec", block.code], **how)
    assert run.returncode == 0, run.stderr
    assert "works where it is installed" in run.stdout and "nothing is missing" in run.stdout.splitlines()[-40:]
    told = subprocess.run([python, "-c", "import ampcompile; print(ampcompile.__file__)"], check=True, **how).stdout
    assert told == f"{clone}/ampcompile/__init__.py\n"


def test_what_is_imported_is_declared() -> None:
    """But for what only some machines have, and is asked for with care, or on request."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    roots = {name.partition(".")[0] for module in SOURCES for name in imports(module)}
    found = roots - {"ampcompile", "accelerate", "triton", "functorch", "__future__"} - sys.stdlib_module_names
    assert found == {re.match(r"\w+", requirement)[0] for requirement in declared}
