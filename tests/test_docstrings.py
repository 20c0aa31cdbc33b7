"""The examples of docstrings print what they say; the reference is made of them, and has each public name."""

import ast
import doctest
import re

import pytest

import ampcompile
from ampcompile import errors
from docs import reference
from tests import pages
from tests.test_layout import ROOT, SOURCES

REFERENCE = "docs/reference.md"


DOCSTRINGS = {
    f"{module}.{getattr(node, 'name', '')}": ast.get_docstring(node) or ""
    for module, path in SOURCES.items()
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
}


@pytest.mark.parametrize("name", [name for name, text in DOCSTRINGS.items() if ">>>" in text])
def test_an_example_prints_what_it_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, said = pages.run(REFERENCE), []  # which says what examples begin with
    example = doctest.DocTestParser().get_doctest(DOCSTRINGS[name], names, name, None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(example, out=said.append, clear_globs=False)  # Dynamo still cleans up in them
    assert not said, "".join(said)


def test_the_reference_is_made_of_the_docstrings_as_they_are():
    assert (ROOT / REFERENCE).read_text() == reference.write(), "python docs/reference.py writes it"


def test_every_public_name_stands_in_the_reference_and_has_an_example():
    text = (ROOT / REFERENCE).read_text()
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    public = {*ampcompile.__all__} - classes
    assert {*re.findall(r"^### `(?:ampcompile\.)?(\w+)`$", text, re.MULTILINE)} >= {*ampcompile.__all__}
    shown = {*re.findall(r"^### `ampcompile\.(\S+)`$", text, re.MULTILINE)}
    assert shown == {*public, "optim.SGD", "optim.Adam", "optim.AdamW", "optim", "integrations.accelerate.AmpPlugin"}
    for name in ampcompile.__all__:
        examples = doctest.DocTestParser().get_examples(getattr(ampcompile, name).__doc__)
        assert examples and (name in classes or any(f"ampcompile.{name}" in each.source for each in examples)), name
