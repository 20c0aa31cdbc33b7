"""python -m tests.figures   measures the size of the repository beside its limits; --write: in CONTRIBUTING, too.

Lines are those of files, empty ones too. The product is `ampcompile/`, `passes/` and `kernels/`. A use of a name is an
`ast.Name` or an argument of a function. Tests without softgpu are `tests/`. They reach for a private name of ours where
they read or set an attribute, give a string to `setattr`, or import: a name with one leading underscore that the
product defines (a function, class, variable or attribute), not of `self` or `cls`, and none that torch's classes or
tuples have. Lines of pages are counted outside of tables, headings and code.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path

import torch

from tests.pages import FENCED
from tests.prose import GENERATED, PAGES
from tests.test_layout import FOLDERS, ROOT

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
HEADING = "| figure | now | at most |\n|---|--:|--:|\n"
TORCHS = {
    name for kind in (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler) for name in dir(kind)
}
TORCHS |= {"_replace", "_asdict", "_fields", "_base", *vars(torch.amp.GradScaler("cpu"))}
TORCHS |= {"_boxed_call", "_repr_html_"}  # AOTAutograd's and IPython's


def files(*folders: str, ends: Iterable[str] = (".py",)) -> list[Path]:
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return [path for path in paths if path.suffix in ends and path.is_file()]


def lines(*folders: str, ends: Iterable[str] = (".py",)) -> int:
    return sum(len(path.read_text().splitlines()) for path in files(*folders, ends=ends))


@cache
def nodes(*folders: str) -> list[ast.AST]:
    return [node for path in files(*folders) for node in ast.walk(ast.parse(path.read_text()))]


def uses(name: str) -> int:
    return sum(
        name in (getattr(node, "id", None), getattr(node, "arg", None)) and not isinstance(node, ast.keyword)
        for node in nodes(*FOLDERS)
    )


def defined() -> Iterator[str]:
    """The product's names of functions, classes, variables and attributes."""
    for node in nodes(*FOLDERS):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def reached() -> Iterator[str]:
    """What tests read or set as an attribute, name to `setattr`, or import."""
    for node in nodes("tests"):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) not in ("self", "cls"):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ampcompile"):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "setattr":
            yield from (str(given.value) for given in node.args[1:2] if isinstance(given, ast.Constant))


def private_names() -> int:
    ours = {name for name in defined() if re.match("_[^_]", name)} - TORCHS
    return sum(name in ours for name in reached())


def long_lines(pages: Iterable[str], limit: int) -> int:
    texts = (FENCED.sub("", (ROOT / page).read_text()) for page in pages)
    return sum(len(line) > limit and not re.match(r"\s*(\||#)", line) for text in texts for line in text.splitlines())


def words() -> int:
    return sum(len((ROOT / page).read_text().split()) for page in PAGES if page not in GENERATED | {"README.md"})


BY_PROGRAMS = [page for page in PAGES if page in GENERATED or "tutorials/" in page]
BY_HAND = [page for page in PAGES if page not in {*BY_PROGRAMS, "README.md"}]
FIGURES: dict[str, tuple[int, Callable[[], int]]] = {
    "lines of the product's Python": (22_500, partial(lines, *FOLDERS)),
    "its files": (168, lambda: len(files(*FOLDERS))),
    "its lines of C++, JS and CSS": (2_500, partial(lines, *FOLDERS, ends=(".cpp", ".h", ".js", ".css"))),
    "lines of tests, without softgpu": (34_500, partial(lines, "tests")),
    "lines of benchmarks and proof": (6_000, partial(lines, "benchmarks", "proof")),
    "lines of softgpu, C++ too": (6_400, partial(lines, "softgpu", ends=(".py", ".cpp", ".h"))),
    "lines of the README": (110, lambda: len((ROOT / "README.md").read_text().splitlines())),
    "words of the pages, without the reference": (45_000, words),
    "lines of pages over 120 characters": (0, partial(long_lines, BY_HAND, 120)),
    "lines over 160 of pages that programs write": (0, partial(long_lines, BY_PROGRAMS, 160)),
    "uses of the name `each` in the product": (39, partial(uses, "each")),
    "uses of the name `found`": (39, partial(uses, "found")),
    "classes of errors": (9, lambda: (ROOT / "ampcompile/errors.py").read_text().count("\nclass ")),
    "private names of ours that tests reach for": (80, private_names),
    "`monkeypatch.setattr` in tests, without softgpu": (
        90,
        lambda: sum(
            path.read_text().count("monkeypatch.setattr(") for path in files("tests") if path != Path(__file__)
        ),
    ),
}
"""By name, the limit and how it is measured."""


def table() -> str:
    rows = (f"| {name} | {measure():,} | {limit:,} |\n" for name, (limit, measure) in FIGURES.items())
    return HEADING + "".join(rows)


def main() -> None:
    text = table()
    print(text, end="")
    if "--write" in sys.argv:
        before, _, after = CONTRIBUTING.read_text().partition(HEADING)
        CONTRIBUTING.write_text(before + text + re.sub(r"\A(\|.*\n)*", "", after))


if __name__ == "__main__":
    main()
