"""The package as it is installed: the list of sub-packages is whole, and so is the wheel."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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
    found = {str(Path(name).parent).replace("/", ".") for name in installed_names() if name.endswith(".py")}
    assert sorted(listed) == sorted(found)


@pytest.mark.ci
def test_the_wheel_holds_every_file_and_no_other(tmp_path: Path) -> None:
    source = tmp_path / "source"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == installed_names()
