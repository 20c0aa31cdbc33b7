"""The command line: what it prints, what it refuses. The commands run in this process, on factories defined here."""

import json
import re
from pathlib import Path

import pytest

import ampcompile
from ampcompile import __main__ as cli
from tests.command_line.conftest import FACTORIES


def line_of(text: str) -> int:
    """The number of the first line of the factories with this text."""
    return next(number for number, line in enumerate(FACTORIES.splitlines(), 1) if text in line)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def test_an_unknown_option_gets_the_usage_of_its_command(shop: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", f"{shop}:breaks", "--dtpye", "bf16"])
    said = capsys.readouterr().err
    assert said.startswith("usage: python -m ampcompile bench") and "found --dtpye bf16; expected" in said


REFUSED = {  # a command without its name of a factory, and what is said of it
    "bench {shop}:breaks --seconds -1": "found --seconds -1; expected a time above 0",
    "bench {shop}:breaks --seconds inf": "found --seconds inf; expected a time above 0",
    "bench {shop}:breaks --policy nonsense": "policy entry 'nonsense' is neither",
    "bench {shop}:breaks --dtype fp8": "option dtype='fp8': expected torch.bfloat16 or",
    "bench {shop}:number": "returned a int; expected (model, args) or (model, args, kwargs)",
    "bench {shop}:four": "returned a tuple of 4; expected (model, args)",
    "bench {shop}:not_callable": "returned a int as model; expected (model, args)",
    "bench {shop}:one_tensor": "returned a Tensor as args; expected (model, args)",
    "bench {shop}:no_keywords": "returned a list as kwargs; expected (model, args)",
    "bench {shop}:instance": "is a Linear; expected a function without arguments that returns (model",
    "bench {shop}:needs_arguments": "can't be called without arguments (missing a requ",
    "bench {shop}:wrong_shape": "returned a model that raises RuntimeError when it is called",
    "bench shop": "expected PACKAGE.MODULE:FACTORY or FILE.py:",
    "bench :a": "expected PACKAGE.MODULE:FACTORY or FILE.py:",
    "bench shop:": "expected PACKAGE.MODULE:FACTORY or FILE.py:",
    "bench no_such_module.inside:model": "found no module 'no_such_module'; expected one",
    "bench shop.py:model": "found no file shop.py; expected a Python file",
}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that is said."""
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    [line] = [line for line in captured.err.splitlines() if not line.startswith("loading")]
    assert not captured.out and line.startswith("error: ")
    return line


@pytest.mark.parametrize("command", REFUSED)
def test_nonsense_is_refused_in_a_line_before_the_work(
    shop: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A factory that raises isn't called."""
    assert REFUSED[command] in refused(capsys, *command.format(shop=shop).split())


def test_what_a_factory_raises_is_said_in_a_line_with_its_place(
    shop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "unread.py").write_text("def model(:\n")
    (tmp_path / "missing.py").write_text("import no_such_module_at_all\n")
    for target, words in {
        f"{shop}:breaks": rf"raises ZeroDivisionError at \S+/{shop}.py:{line_of('own')}: the factory's own. Expected a",
        f"{shop}:breaks_in_torch": rf"raises TypeError at \S+/{shop}.py:{line_of('in_torch')}: ",
        "unread:model": r"raises SyntaxError: invalid syntax \(unread.py, line 1\)",
        f"{tmp_path}/missing.py:model": f"raises ModuleNotFoundError at {tmp_path}/missing.py:1: No module named",
    }.items():
        assert re.match(f"error: loading {target} {words}", refused(capsys, "bench", target))


def test_help_and_version_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for option in ("--help", "--version"):
        with pytest.raises(SystemExit, match="0"):
            cli.main([option])
        said.append(capsys.readouterr().out)
    assert all(word in said[0] for word in ("bench", "doctor"))
    assert said[1] == f"ampcompile {ampcompile.__version__}\n"


@pytest.mark.slow
def test_bench_compiles_and_runs_what_it_names(shop: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "bench", f"{shop}:model", "--seconds", "0.5", "--json"))
    assert found["work"] == "training" and not any(c["failed"] for c in found["candidates"])
