"""The layout checks itself: the import law, and tests for each room."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def import_name(path: Path) -> str:
    parts = path.relative_to(ROOT / "ampcompile" if path.is_relative_to(ROOT / "ampcompile") else ROOT).parts
    return ".".join(("ampcompile", *parts)).removesuffix(".py").removesuffix(".__init__")


FOLDERS = ("ampcompile", "passes", "kernels")
SOURCES = {import_name(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}

# The import law: what each room may import, rooms below it aside. A file belongs to the longest name that fits.
LAW = [
    {"errors", "dtypes", "about"},
    {"torch_private"},
    {"passes.analysis.op_traits"},
    {"kernels.tables"},
    {"kernels.triton"},
    {"kernels"},
    {"weights", "rules"},
    {"policy", "optim", "precision"},
    {"config", "sharding", "scaler"},
    {"passes.graph", "passes.base", "passes.weight_copy"},
    {"passes.analysis"},
    {"passes.capture", "passes.decide", "passes.before", "passes.after", "passes.replay", "passes.share_casts"},
    {"passes.pipeline", "passes"},
    {"records"},
    {"compiler"},
    {"backend", "insight"},
    {"timing"},
    {"command_line", "__init__", "integrations"},
    {"__main__"},
]
OPEN = {
    "passes.graph",
    "passes.base",
    "passes.weight_copy",
    "errors",
    "dtypes",
}  # import one another


@cache
def tree(module: str) -> ast.Module:
    """A file's syntax."""
    return ast.parse(SOURCES[module].read_text())


def room(module: str) -> tuple[int, str]:
    """Height and name of a module's room."""
    inner = module.removeprefix("ampcompile").removeprefix(".") or "__init__"
    fitting = [
        (len(name), height, name)
        for height, names in enumerate(LAW)
        for name in names
        if inner == name or inner.startswith((name + ".", name + "_"))
    ]
    assert fitting, f"{module} is in no room"
    return max(fitting)[1:]


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@cache
def imports(module: str, for_types: bool = True) -> set[str]:
    """Full names of the modules that a file imports, also inside functions; `for_types`: for annotations alone, too."""
    path, found = SOURCES[module], set()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    unread = [each for node in ast.walk(tree(module)) if is_for_types(node) for each in ast.walk(node)]
    for node in ast.walk(tree(module)):
        if not for_types and node in unread:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            inside = {f"{origin}.{alias.name}" for alias in node.names}
            found |= (inside & SOURCES.keys()) or {origin}
    return found


def test_the_import_law_holds() -> None:
    for module in SOURCES:
        height, name = room(module)
        for other in imports(module) & SOURCES.keys() - {module}:
            above, its = room(other)
            assert above < height or its == name or (above == height and {name, its} <= OPEN), (
                f"{module} ({name}) imports {other} ({its}), which stands above or beside it"
            )


def test_no_files_import_one_another() -> None:
    TopologicalSorter({module: imports(module, for_types=False) - {module} for module in SOURCES}).prepare()


def test_imports_are_by_installed_name_and_triton_stays_in_its_folder() -> None:
    for module in SOURCES:
        roots = {name.split(".")[0] for name in imports(module)}
        assert not roots & {"passes", "kernels", "tests", "benchmarks"}, (
            f"{module}: installed names begin with ampcompile"
        )
        assert "triton" not in roots or room(module)[1] == "kernels.triton", f"{module}: only kernels/triton imports it"


def test_tests_use_the_proof_and_the_benchmarks_and_the_proof_uses_the_benchmarks() -> None:
    for folder, above in (("proof", {"tests"}), ("benchmarks", {"tests", "proof"})):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not {name.split(".")[0] for name in names} & above, path


def test_every_room_has_its_tests() -> None:
    rooms = {path.parent for path in SOURCES.values() if path.parent not in (ROOT / folder for folder in FOLDERS)}
    for folder in rooms:
        inside = folder.relative_to(ROOT / "ampcompile" if folder.is_relative_to(ROOT / "ampcompile") else ROOT)
        assert list((ROOT / "tests" / inside).glob("test_*.py")), f"tests/{inside} has no test"


@pytest.mark.ci
def test_all_but_the_gpus_kernels_imports_where_there_is_no_triton() -> None:
    inside = [module for module in SOURCES if room(module)[1] not in ("kernels.triton", "integrations", "__main__")]
    code = (
        "import sys, importlib; sys.modules['triton'] = None\nfor name in sys.argv[1:]: importlib.import_module(name)"
    )
    subprocess.run([sys.executable, "-c", code, *inside], check=True, timeout=300)
