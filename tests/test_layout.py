"""The layout checks itself: the import law, file lengths, mirrored tests, docstrings, names."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def import_name(path: Path) -> str:
    parts = path.relative_to(ROOT / "ampcompile" if path.is_relative_to(ROOT / "ampcompile") else ROOT).parts
    return ".".join(("ampcompile", *parts)).removesuffix(".py").removesuffix(".__init__")


FOLDERS = ("ampcompile", "passes", "kernels")
SOURCES = {import_name(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}

# The import law, lowest first: a module imports from the layers under its own, and from its own unless it is
# CLOSED. A name stands for itself, its family (`rules` for `rules_cpu`) and what is inside it. The longest
# match counts; the empty name matches all.
LAW = [
    {"errors", "dtypes", "compat"},
    {"policy", "rules", "config"},
    {"kernels.triton"},
    {"kernels"},
    {"weights", "packing", "scaler"},
    {"passes.graph", "passes.verify", "passes.base", "passes.higher_order", "passes.opaque", "passes.weight_copy"},
    {"passes.aliasing", "passes.commuting", "passes.gradients", "passes.lengths", "passes.minimum_cut", "passes.sizes"},
    {"passes.decisions", "passes.fusing", "passes.losses", "passes.norm_spellings", "passes.range_guards"},
    {"passes.repeats"},
    {"passes"},
    {"passes.pipeline"},
    {"lower", "ambient", "backend", ""},
    {"explain", "audit"},
    {"__init__", "__main__", "cli"},
]
CLOSED = {"passes"}  # layers whose modules know nothing of one another


def layer(module: str) -> tuple[int, str]:
    """Height and name of a module's layer."""
    inner = module.removeprefix("ampcompile").removeprefix(".") or "__init__"
    _, height, name = max(
        (len(name), height, name)
        for height, names in enumerate(LAW)
        for name in names
        if inner == name or not name or inner.startswith((name + ".", name + "_"))
    )
    return height, name


def imports(module: str) -> set[str]:
    """Full names of the modules that a file imports, also inside functions and under TYPE_CHECKING."""
    path, found = SOURCES[module], set()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            inside = {f"{origin}.{alias.name}" for alias in node.names}
            found |= (inside & SOURCES.keys()) or {origin}
    return found


@pytest.mark.parametrize("module", SOURCES)
def test_the_import_law_holds(module: str) -> None:
    height, name = layer(module)
    for other in imports(module) & SOURCES.keys() - {module}:
        above, family = layer(other)
        assert above <= height, f"{module} ({name}) imports {other} ({family}), which stands above it"
        assert not (above == height and name in CLOSED), f"{module} imports its neighbour {other}"


@pytest.mark.parametrize("module", SOURCES)
def test_imports_are_by_installed_name_and_triton_stays_in_its_folder(module: str) -> None:
    roots = {name.split(".")[0] for name in imports(module)}
    assert not roots & {"passes", "kernels", "tests", "benchmarks"}, "installed names begin with ampcompile"
    assert "triton" not in roots or layer(module)[1] == "kernels.triton", "only kernels/triton imports it"


@pytest.mark.parametrize("module", SOURCES)
def test_a_file_is_short_and_says_what_it_is(module: str) -> None:
    text = SOURCES[module].read_text()
    assert text.count("\n") <= 300, "one idea a file: at most 300 lines"
    assert ast.get_docstring(ast.parse(text)), "a module starts with a docstring"
    assert SOURCES[module].stem not in {"utils", "util", "common", "helpers"}, "a name says what is inside"


def test_passes_and_kernels_have_their_tests() -> None:
    missing = [
        str(test.relative_to(ROOT))
        for folder in ("passes", "kernels")
        for path in sorted((ROOT / folder).glob("[!_]*.py"))
        if not (test := ROOT / "tests" / folder / f"test_{path.name}").exists()
    ]
    assert not missing


def test_the_package_imports_where_there_is_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import ampcompile.passes, ampcompile.kernels"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
