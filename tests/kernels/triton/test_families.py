"""Each family of Triton kernels: its numbers in Triton's interpreter, its machine code from Triton's compiler."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
SOURCES = [ast.parse(path.read_text()) for path in (HERE.parents[2] / "kernels" / "triton").glob("*.py")]
FAMILIES = [path.stem.removeprefix("interpreted_") for path in sorted(HERE.glob("interpreted_*.py"))]


def families(*left_to_ci: str) -> pytest.MarkDecorator:
    """Cases of families: those of each run share a process."""
    together = [family for family in FAMILIES if family not in left_to_ci]
    others = [pytest.param([family], marks=pytest.mark.ci) for family in left_to_ci]
    return pytest.mark.parametrize("chosen", [together, *others], ids=" ".join)


def python(*arguments: str, **environment: str) -> None:
    """Run in a process of its own: the interpreter is chosen before Triton is imported, and a bad pointer kills."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=HERE.parents[2],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


@families("step")  # which takes 25 s
def test_numbers_in_the_interpreter(chosen: list[str]) -> None:
    files = [str(HERE / f"interpreted_{family}.py") for family in chosen]
    python("-m", "pytest", "-p", "no:cacheprovider", *files, TRITON_INTERPRET="1")


@families()
def test_machine_code(chosen: list[str]) -> None:
    python("-m", "tests.kernels.triton.compiling", *chosen, TRITON_INTERPRET="0")


def test_a_profile_shows_whose_kernels_they_are() -> None:
    functions = [node for tree in SOURCES for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    jitted = [f for f in functions if any("triton.jit" in ast.unparse(decorator) for decorator in f.decorator_list)]
    called = {ast.unparse(node.func) for f in jitted for node in ast.walk(f) if isinstance(node, ast.Call)}
    launched = {f.name for f in jitted} - called
    assert launched and all(name.startswith("amp_") for name in launched)
