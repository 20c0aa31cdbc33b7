"""The layout checks itself: the import law, and a test for each file."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


def import_name(path: Path) -> str:
    parts = path.relative_to(ROOT / "ampcompile" if path.is_relative_to(ROOT / "ampcompile") else ROOT).parts
    return ".".join(("ampcompile", *parts)).removesuffix(".py").removesuffix(".__init__")


FOLDERS = ("ampcompile", "passes", "kernels")
SOURCES = {import_name(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}

# The import law: what each room may import, rooms below it aside. A file belongs to the longest name that fits.
LAW = [
    {"errors", "dtypes"},
    {"torch_private"},
    {"passes.analysis.schema"},
    {"passes.analysis.op_traits"},
    {"kernels.triton"},
    {"kernels"},
    {"weights", "rules"},
    {"policy", "scaler", "precision"},
    {"config", "sharding"},
    {"passes.graph", "passes.verify", "passes.base", "passes.weight_copy", "passes.watch_op"},
    {"passes.analysis"},
    {"passes.capture", "passes.decide", "passes.before", "passes.fuse", "passes.after", "passes.replay"},
    {"passes.pipeline", "passes"},
    {"records"},
    {"compiler"},
    {"backend", "explaining"},
    {"auditing", "watching"},
    {"command_line", "__init__", "integrations"},
    {"__main__"},
]
OPEN = {
    "passes.graph",
    "passes.verify",
    "passes.base",
    "passes.weight_copy",
    "passes.watch_op",
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


@cache
def imports(module: str) -> set[str]:
    """Full names of the modules that a file imports, also inside functions and for annotations."""
    path, found = SOURCES[module], set()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree(module)):
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


def test_imports_are_by_installed_name_and_triton_stays_in_its_folder() -> None:
    for module in SOURCES:
        roots = {name.split(".")[0] for name in imports(module)}
        assert not roots & {"passes", "kernels", "tests", "benchmarks"}, (
            f"{module}: installed names begin with ampcompile"
        )
        assert "triton" not in roots or room(module)[1] == "kernels.triton", f"{module}: only kernels/triton imports it"


# Files without a test of their own, or whole rooms, and who tests them.
UNTESTED = {
    "backend": "an alias",
    "errors": "classes alone: each is raised, with its text, in the tests of who raises it",
    "rules.accelerator": "data: tests/rules/test_table.py and test_parity.py hold it against torch",
    "rules.cpu": "data: tests/rules/test_table.py and test_parity.py hold it against torch",
    "kernels.triton": "in processes of their own, by tests/kernels/triton/test_families.py",
    "torch_private.pytree": "names alone: without one of them nothing imports",
    "torch_private.types": "names alone: without one of them nothing imports",
}


def mirrored() -> dict[Path, str]:
    """Every test that a file of ours asks for, and the file's name."""
    found = {}
    for module, path in SOURCES.items():
        inner = module.removeprefix("ampcompile.")
        if not path.stem.startswith("__"):
            found[ROOT.joinpath("tests", *inner.split(".")[:-1], f"test_{path.name}")] = module
    return found


def test_every_file_has_its_test() -> None:
    missing = {module for test, module in mirrored().items() if not test.exists()}
    excused = {m for m in missing for name in UNTESTED if f"{m}.".startswith(f"ampcompile.{name}.")}
    assert missing == excused
    unused = [name for name in UNTESTED if not any(f"{m}.".startswith(f"ampcompile.{name}.") for m in excused)]
    assert not unused, "these have their tests, or are gone"


def test_all_but_the_gpus_kernels_imports_where_there_is_no_triton() -> None:
    inside = [module for module in SOURCES if room(module)[1] not in ("kernels.triton", "integrations", "__main__")]
    code = (
        "import sys, importlib; sys.modules['triton'] = None\nfor name in sys.argv[1:]: importlib.import_module(name)"
    )
    subprocess.run([sys.executable, "-c", code, *inside], check=True, timeout=300)
