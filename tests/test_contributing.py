"""CONTRIBUTING.md and what it links to name files, functions, targets of `make` and imports that exist."""

import ast
import importlib
import re
import textwrap

import pytest

from tests.test_layout import ROOT

TEXTS = {name: (ROOT / name).read_text() for name in ("CONTRIBUTING.md", "docs/adding_a_kernel.md")}
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
# What a reader who follows the recipes adds.
ADDED = ("count_zeros", "drop_negations")
BLOCKS = [textwrap.dedent(code) for text in TEXTS.values() for kind, code in BLOCK.findall(text) if kind == "python"]


def quoted(text: str) -> list[str]:
    """What stands between backticks, code blocks aside."""
    return re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))


@pytest.mark.parametrize("page", TEXTS)
def test_paths_are_those_of_files_and_folders(page: str) -> None:
    words = [word for code in quoted(TEXTS[page]) for word in code.split() if re.fullmatch(r"\w[\w.]*(/[\w.]*)+", word)]
    links = re.findall(r"\]\(([^)#:]+)\)", BLOCK.sub("", TEXTS[page]))
    known = [word for word in (*words, *links) if not any(each in word for each in ADDED)]
    assert words and links
    # A row of the table names its first folder in full.
    places = (ROOT, ROOT / "ampcompile", (ROOT / page).parent)
    assert not {path for path in known if not any((place / path).exists() for place in places)}


def test_the_makefile_names_tests_that_exist() -> None:
    named = re.findall(r"tests/[\w/]*\w(?:\.py)?", (ROOT / "Makefile").read_text())
    assert len(named) > 8 and not [path for path in named if not (ROOT / path).exists()]


def test_all_pages_name_files_of_ours_that_exist() -> None:
    folder = r"`((?:ampcompile|passes|kernels|tests|benchmarks|examples/(?:ecosystem|recipes|steering))/[\w./]*)`"
    named = {path for page in (ROOT / "docs").glob("*.md") for path in re.findall(folder, page.read_text())}
    assert len(named) > 10
    assert not {path for path in named if not (ROOT / path).exists() and not any(each in path for each in ADDED)}


def test_names_are_in_the_files_that_are_said_to_hold_them() -> None:
    said = [
        (name, path)
        for text in TEXTS.values()
        for names, path in re.findall(r"((?:`\w+(?:\(\))?`(?:, | and )?)+) (?:of|in) `([\w/]+\.py)`", text)
        for name in re.findall(r"\w+", names.replace(" and ", " "))
    ]
    assert len(said) > 5
    assert not [(name, path) for name, path in said if name not in (ROOT / path).read_text()]


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = [code.split()[1:] for text in TEXTS.values() for code in quoted(text) if code.startswith("make ")]
    named = {word for words in asked for word in words[: next((i for i, w in enumerate(words) if "=" in w), None)]}
    assert named and not named - targets


@pytest.mark.parametrize("code", BLOCKS)
def test_examples_import_what_exists(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and not node.level and not any(each in node.module for each in ADDED):
            module = importlib.import_module(node.module)
            known = {alias.name for alias in node.names} - {*ADDED}
            assert not {name for name in known if not hasattr(module, name)}
