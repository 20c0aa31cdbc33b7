"""The command line: what it prints, what it refuses. The commands run in this process, on factories defined here."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ampcompile
from ampcompile.command_line import main as cli
from ampcompile.errors import AmpWarning
from tests.command_line.conftest import FACTORIES
from tests.devices import said


def line_of(text: str) -> int:
    """The number of the first line of the factories with this text."""
    return next(number for number, line in enumerate(FACTORIES.splitlines(), 1) if text in line)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def test_explain_prints_the_report_and_writes_the_page(
    shop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "amp.html"
    assert cli.main(["explain", f"{shop}:model", "--html", str(page)]) == 0
    out, said = capsys.readouterr()
    assert "aten.linear" in out and out.startswith("amp ") and f"wrote {page}" in said.splitlines()
    assert "<html" in page.read_text()


def test_explain_gives_json(shop: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "explain", f"{shop}:model", "--json", "--dtype", "fp16"))
    assert [f"{op['op']} {op['dtype']}" for op in found["ops"]] == [
        "aten.linear f16",
        "aten.tanh f16",
        "aten.linear f16",
    ]
    casts = [f"{cast['op']} {cast['dtype_to']}" for cast in found["casts"]]
    assert casts == ["aten.linear f16"] * 5 + ["output f32"]


def test_audit_gives_numbers(shop: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "audit", f"{shop}:model", "--json", "--suggest", "1e-5"))
    assert found["against"] == "f64" and found["gradients"].keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert found["gradient_error"] > 1e-4 >= 1e-5 >= found["suggested_error"]
    assert "fp32" in found["suggested"]
    out = printed(capsys, "audit", f"{shop}:function", "--forward-only", "--against", "float32")
    assert "mixed run against f32" in out and "gradients" not in out
    out = printed(capsys, "audit", f"{shop}:overflowing", "--dtype", "float16")
    assert "first overflow: aten.mul in no module" in out


def test_audit_in_float16_scales_the_loss_or_says_that_it_does_not(
    shop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    half = "--dtype", "float16"
    for arguments, told in (((), False), (half, True), ((*half, "--loss-scale", "65536"), False)):
        assert cli.main(["audit", f"{shop}:model", "--json", *arguments]) == 0
        found = capsys.readouterr()
        assert ("a loss that isn't scaled: if a GradScaler scales yours, give --loss-scale 65536" in found.err) == told
    text = printed(capsys, "audit", f"{shop}:model")
    assert "the worst first: those that overflow, then by to zero, then by alone" in " ".join(text.split())


@pytest.mark.parametrize("command", ["explain", "audit"])
def test_warnings_name_the_file_of_the_factory(shop: str, command: str, tmp_path: Path) -> None:
    with pytest.warns(AmpWarning, match="pattern 'sofmax' matches no op") as found:
        assert cli.main([command, f"{shop}:model", "--policy", "op sofmax=fp32"]) == 0
    assert {(w.filename, w.lineno) for w in found} == {(str(tmp_path / f"{shop}.py"), line_of("def model():"))}


def test_an_unknown_option_gets_the_usage_of_its_command(shop: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["explain", f"{shop}:breaks", "--dtpye", "bf16"])
    said = capsys.readouterr().err
    assert said.startswith("usage: python -m ampcompile explain") and "found --dtpye bf16; expected" in said


REFUSED = {  # a command without its name of a factory, and what is said of it
    "bench {shop}:breaks --seconds -1": "found --seconds -1; expected a time above 0",
    "bench {shop}:breaks --seconds inf": "found --seconds inf; expected a time above 0",
    "audit {shop}:breaks --loss-scale 0": "found --loss-scale 0; expected a factor above 0",
    "audit {shop}:breaks --suggest nan": "found --suggest nan; expected a relative error above 0",
    "explain {shop}:breaks --html no/such/folder.html": "can't write no/such/folder.html; expected a file",
    "explain {shop}:breaks --policy nonsense": "policy entry 'nonsense' is neither",
    "explain {shop}:breaks --dtype fp8": "option dtype='fp8': expected torch.bfloat16 or",
    "explain {shop}:number": "returned a int; expected (model, args) or (model, args, kwargs)",
    "explain {shop}:four": "returned a tuple of 4; expected (model, args)",
    "explain {shop}:not_callable": "returned a int as model; expected (model, args)",
    "explain {shop}:one_tensor": "returned a Tensor as args; expected (model, args)",
    "explain {shop}:no_keywords": "returned a list as kwargs; expected (model, args)",
    "explain {shop}:instance": "is a Linear; expected a function without arguments that returns (model",
    "explain {shop}:needs_arguments": "can't be called without arguments (missing a requ",
    "explain {shop}:wrong_shape": "returned a model that raises RuntimeError when it is called",
    "explain shop": "expected PACKAGE.MODULE:FACTORY or FILE.py:",
    "explain :a": "expected PACKAGE.MODULE:FACTORY or FILE.py:",
    "explain shop:": "expected PACKAGE.MODULE:FACTORY or FILE.py:",
    "explain no_such_module.inside:model": "found no module 'no_such_module'; expected one",
    "explain shop.py:model": "found no file shop.py; expected a Python file",
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
        assert re.match(f"error: loading {target} {words}", refused(capsys, "explain", target))


def test_help_and_version_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for option in ("--help", "--version"):
        with pytest.raises(SystemExit, match="0"):
            cli.main([option])
        said.append(capsys.readouterr().out)
    assert all(word in said[0] for word in ("explain", "audit", "bench", "doctor"))
    assert said[1] == f"ampcompile {ampcompile.__version__}\n"


def test_steps_go_to_stderr_and_no_name_is_split_when_piped(tmp_path: Path) -> None:
    name = "a_module_whose_name_is_so_long_that_it_never_fits_beside_the_reasons_of_anything"
    (tmp_path / "shop.py").write_text(
        f"import torch\ndef model():\n    m = torch.nn.Module()\n    m.{name} = torch.nn.Linear(8, 8)\n"
        f"    m.forward = lambda x: m.{name}(x)\n    return m, (torch.ones(2, 8),)\n"
    )
    command = [sys.executable, "-m", "ampcompile", "explain", "shop.py:model"]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment, check=True
    )
    assert name in run.stdout and said(run.stderr) == ["loading shop.py:model", "explaining"]


@pytest.mark.slow
def test_bench_compiles_and_runs_what_it_names(shop: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "bench", f"{shop}:model", "--seconds", "0.5", "--json"))
    assert found["work"] == "training" and not any(c["failed"] for c in found["candidates"])
