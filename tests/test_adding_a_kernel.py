"""docs/adding_a_kernel.md, followed word for word in a copy of the repository, adds a kernel that passes its tests."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pages
from tests.test_layout import ROOT

FILES = (
    "kernels/count_zeros.py",
    "kernels/cpp/step.cpp",
    "kernels/triton/count_zeros.py",
    "tests/kernels/test_count_zeros.py",
    "tests/kernels/triton/interpreted_count_zeros.py",
    "tests/kernels/triton/compiled_count_zeros.py",
)
"""What the page's blocks are for, in order."""


def copy_of_the_repository(folder: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for package in ("passes", "kernels"):  # before the installed package, which is the repository's own
        (folder / "ampcompile" / package).symlink_to(folder / package)


@pytest.mark.ci
def test_the_recipe_works(tmp_path: Path) -> None:
    copy_of_the_repository(tmp_path)
    for name, block in zip(FILES, pages.blocks("docs/adding_a_kernel.md"), strict=True):
        path, code = tmp_path / name, block.code
        if path.exists():
            place = re.search(r"^void unscale\(.*?^}\n", path.read_text(), re.DOTALL | re.MULTILINE)[0]
            code = path.read_text().replace(place, f"{place}\n{code}")
        path.write_text(code)
    asked = ["tests/kernels", "tests/test_layout.py", "-k", "count_zeros or layout"]
    command = [sys.executable, "-m", "pytest", *asked]
    environment = {**os.environ, "AMPCOMPILE_CACHE_DIR": str(tmp_path / "cache")}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
