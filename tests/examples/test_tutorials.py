"""The pages and notebooks of tutorials are those of their scripts; `make docs` runs the scripts."""

import ast
import json

import pytest

from examples.tutorials import __main__ as tutorials


@pytest.mark.parametrize("name", tutorials.NAMES)
def test_page_and_notebook_are_made_of_the_script(name: str) -> None:
    cells, page = tutorials.cells(name), (tutorials.PAGES / f"{name}.md").read_text()
    written = json.loads((tutorials.PAGES / f"{name}.ipynb").read_text())["cells"]
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in written] == cells, "make pages"
    places = [page.find(cell.text) for cell in cells]
    assert -1 not in places and places == sorted(places), "make pages"
    assert any(cell.get("outputs") for cell in written) and "Output of a run on: " in page


@pytest.mark.parametrize("name", tutorials.NAMES)
def test_it_asserts_something_and_its_code_keeps_its_lines(name: str) -> None:
    lines = (tutorials.FOLDER / f"{name}.py").read_text().splitlines()
    code = [(index, cell) for index, cell in enumerate(tutorials.cells(name)) if cell.kind == "code"]
    assert any(isinstance(node, ast.Assert) for _, cell in code for node in ast.walk(ast.parse(cell.text)))
    for index, cell in code:
        padded = tutorials.padded(name, index, cell).splitlines()
        first = next(number for number, line in enumerate(padded) if line)
        assert padded[first:] == lines[first : len(padded)]


def test_every_script_is_a_tutorial() -> None:
    assert {path.stem for path in tutorials.FOLDER.glob("[!_]*.py")} == {*tutorials.NAMES}
