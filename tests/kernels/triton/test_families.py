"""Each family of Triton kernels: what is seen in the code that Triton's compiler makes of it, and their names."""

import ast
import importlib
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
SOURCES = [ast.parse(path.read_text()) for path in (HERE.parents[2] / "kernels" / "triton").glob("*.py")]
FAMILIES = [path.stem.removeprefix("compiled_") for path in sorted(HERE.glob("compiled_*.py"))]


@pytest.mark.parametrize("capability", [90, *(pytest.param(each, marks=pytest.mark.ci) for each in (80, 100))])
@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow if f == "step" else ()) for f in FAMILIES])
def test_compiled_code(family: str, capability: int) -> None:
    importlib.import_module(f"tests.kernels.triton.compiled_{family}").check(capability)


def test_a_profile_shows_whose_kernels_they_are() -> None:
    functions = [node for tree in SOURCES for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    jitted = [f for f in functions if any("triton.jit" in ast.unparse(decorator) for decorator in f.decorator_list)]
    called = {ast.unparse(node.func) for f in jitted for node in ast.walk(f) if isinstance(node, ast.Call)}
    launched = {f.name for f in jitted} - called
    assert launched and all(name.startswith("amp_") for name in launched)
