"""The pages keep their word: their Python runs, their commands exist, every option and command has its explanation."""

import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampcompile
from ampcompile import config
from ampcompile.command_line import main as command_line
from tests import pages
from tests.test_layout import ROOT

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
ELSEWHERE = {
    "README.md": "behaviour/test_readme.py",
    "docs/adding_a_kernel.md": "test_adding_a_kernel.py",
    "docs/audit.md": "auditing/test_docs.py",
    "docs/explain.md": "behaviour/test_steering_docs.py",
    "docs/export.md": "compiler/test_export.py",
    "docs/integrations.md": "integrations/test_page.py",
    "docs/steering.md": "behaviour/test_steering_docs.py",
}
"""Pages whose Python runs in tests of their own."""
NOT_PYTHON = {"cpp", "diff"}
SHELLS = {"", "bash", "console", "sh", "shell"}
PROGRAMS = {"git", "make", "pip", "python", "python3"}


def training() -> dict[str, Any]:
    model = nn.Linear(4, 3)
    return {
        "ampcompile": ampcompile,
        "batches": [(torch.randn(5, 4), torch.randint(3, (5,)))],
        "compiled_model": torch.compile(model, backend="amp"),
        "loss_fn": nn.functional.cross_entropy,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
    }


class Writer:
    """As TensorBoard's writer: raises where it isn't given a number, or text."""

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert name and float(value) >= 0 and step >= 0

    def add_text(self, name: str, text: str, step: int) -> None:
        assert name and text and step >= 0


def watching() -> dict[str, Any]:
    scaler = ampcompile.GradScaler("cpu")
    model = nn.Linear(4, 3)
    given = {"torch": torch, "model": model, "optimizer": torch.optim.SGD(model.parameters())}
    return training() | given | {"scaler": scaler, "writer": Writer(), "step": 1}


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/masters.md": training,
    "docs/scaler.md": training,
    "docs/watch.md": watching,
    "docs/weights.md": lambda: {
        "torch": torch,
        "ampcompile": ampcompile,
        "model": nn.Linear(4, 4),
        "x": torch.ones(2, 4),
    },
}
"""What a page's Python takes for granted."""


LONG = "docs/migration.md"


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.ci if page == LONG else ()) for page in PAGES if page not in ELSEWHERE],
)
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pages.run(page, **GIVEN[page]() if page in GIVEN else {})


@pytest.mark.parametrize("page", PAGES)
def test_no_block_goes_unseen(page: str) -> None:
    text, found = (ROOT / page).read_text(), pages.blocks(page)
    assert 2 * len(found) == len(re.findall(r"^ *```", text, re.MULTILINE)), "a fence that the pattern misses"
    assert {block.language for block in found if block.language[:1] != "{"} <= {*SHELLS, "python", *NOT_PYTHON}
    assert page not in ELSEWHERE or f'"{page}"' in (ROOT / "tests" / ELSEWHERE[page]).read_text()


def commands(page: str) -> Iterator[list[str]]:
    """The words of each command in a page's blocks: of lines behind a `$`, else of all lines of a block of commands."""
    for block in pages.blocks(page):
        lines = block.code.splitlines()
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        if block.language in SHELLS and (prompted or block.language or lines[0].split()[0] in PROGRAMS):
            for line in prompted or lines:
                words = shlex.split(line, comments=True)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    del words[0]
                yield words[: words.index("|") if "|" in words else None]


COMMANDS = [(page, words) for page in PAGES for words in commands(page)]
OURS = {shlex.join(words[3:]) for _, words in COMMANDS if words[1:3] == ["-m", "ampcompile"]}


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[shlex.join(words) for _, words in COMMANDS])
def test_commands_exist(page: str, words: list[str]) -> None:
    assert words[0] in PROGRAMS
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= {*targets}
    elif words[1:2] == ["-m"]:
        assert importlib.util.find_spec(words[2])
    elif words[0].startswith("python") and "/" in words[1]:  # what stands in no folder is the reader's own
        assert (ROOT / words[1]).exists()


@pytest.mark.ci
@pytest.mark.parametrize("line", sorted(OURS))
def test_the_command_line_runs_as_shown(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    pages.run("docs/command_line.md")
    words = shlex.split(line.replace("pkg/mod.py:factory", "mymodels.py:mlp"))  # the reader's own
    assert command_line.main([*words, "--seconds", "0.1"] if words[0] == "bench" else words) == 0


def test_each_command_and_its_options_are_explained() -> None:
    text = (ROOT / "docs/command_line.md").read_text()
    (commands,) = (action for action in command_line._parser()._actions if action.dest not in ("help", "version"))
    for name, parser in commands.choices.items():
        assert f"\n## {name}\n" in text
        options = {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}
        assert not [option for option in options if f"`{option}" not in text]


def test_each_option_and_its_values_are_explained() -> None:
    text = (ROOT / "docs/options.md").read_text()
    explained = re.findall("`(.+?)`", " ".join(re.findall(r"^## (.+)$", text, re.MULTILINE)))
    assert {*explained} == {*config.Options.__dataclass_fields__, "mode"} - {"inductor"}
    values = {value for choices in config._CHOICES.values() for value in choices}
    assert not [value for value in values if f'`"{value}"`' not in text]


def test_a_stranger_finds_the_way_into_the_site() -> None:
    titles = {page: (ROOT / page).read_text().splitlines()[0] for page in PAGES}
    for page, title in {
        "docs/explain.md": "# Explain: every cast and why",
        "docs/placement.md": "# Cast placement",
    }.items():
        assert titles[page] == title
    readme, index = (ROOT / "README.md").read_text(), (ROOT / "docs/index.md").read_text()
    first_screen, shown = readme[:3000], readme.split("## See what was decided")[0]
    assert "make demo" in first_screen and "make test" in first_screen
    assert "pip install" in shown and "## Quickstart" in shown and "README.md" in index and "## Limits" in index
    assert '"sphinx_copybutton"' in (ROOT / "docs/conf.py").read_text(), "buttons that copy a block"
