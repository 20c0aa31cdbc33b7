"""What came of the suite's files, as pytest notes it and the page tells it."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.records import Records
from proof import versions
from proof.results import about


def test_a_later_run_of_a_file_replaces_the_earlier_one(tmp_path: Path) -> None:
    versions.note(tmp_path, [("tests/a.py::x", "passed"), ("tests/a.py::y[1]", "failed"), ("tests/b.py::x", "skipped")])
    versions.note(tmp_path, [("tests/a.py::x", "passed"), ("tests/a.py::y[1]", "passed")])
    page = "".join(versions.chapter(tmp_path))
    (row,) = [line for line in page.splitlines() if line.startswith("| torch")]
    version = f"torch {torch.__version__}, Python {about()['python']}"
    assert row.startswith(f"| {version} | {about()['processor']}")
    assert " | 2 | 2 | 1 | 0 | " in row
    never = page.partition("not run so far: ")[2]
    assert all((python in never) == (python != f"3.{sys.version_info.minor}") for python in versions.PYTHONS)
    assert not list(versions.chapter(tmp_path / "elsewhere"))


def test_pytest_notes_what_came_of_a_shard(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert False\n"
        "def test_is_skipped(): pytest.skip('why')\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError\n"
        "def test_errs(broken): pass\n"
    )
    (tmp_path / "test_other.py").write_text("def test_of_another_shard(): pass\n")
    root = Path(__file__).parents[2]
    options = ["-c", root / "pyproject.toml", "--rootdir", tmp_path, "-p", "tests.conftest", "--shard=1/2"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--note={tmp_path}", tmp_path],
        env=os.environ | {"PYTHONPATH": str(root)}, cwd=tmp_path, check=False,
    )  # fmt: skip
    (found,) = Records.load(tmp_path / versions.NAME).stages.values()
    assert found == {"test_it.py": {"passed": 1, "failed": 2, "skipped": 1}}
