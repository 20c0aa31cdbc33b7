"""The command line: what it prints, what it refuses. The commands run in this process, on factories defined here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ampcompile.command_line import main as cli


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def test_explain_prints_the_report_and_writes_the_page(
    shop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "amp.html"
    out = printed(capsys, "explain", f"{shop}:model", "--html", str(page))
    assert "aten.linear" in out and "casts inserted" in out
    assert "<html" in page.read_text()


def test_explain_gives_json(shop: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "explain", f"{shop}:model", "--json", "--dtype", "float16"))
    assert [(op["op"], op["dtype"]) for op in found["ops"]] == [
        ("aten.linear", "f16"),
        ("aten.tanh", "f16"),
        ("aten.linear", "f16"),
    ]
    assert [cast["dtype_to"] for cast in found["casts"] if cast["op"] != "output"] == ["f16"] * 5
    assert found["casts"][-1]["op"] == "output" and found["casts"][-1]["dtype_to"] == "f32"


def test_audit_gives_numbers(shop: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "audit", f"{shop}:model", "--json", "--suggest", "1e-5"))
    assert found["against"] == "f64" and found["gradients"].keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert found["gradient_error"] > 1e-4 >= 1e-5 >= found["suggested_error"]
    assert "fp32" in found["suggested"]
    out = printed(capsys, "audit", f"{shop}:function", "--forward-only", "--against", "float32")
    assert "mixed run against f32" in out and "gradients" not in out
    out = printed(capsys, "audit", f"{shop}:overflowing", "--dtype", "float16")
    assert "first overflow: aten.mul in no module" in out


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("number", "returned a int; expected (model, args) or (model, args, kwargs)"),
        ("four", "returned a tuple of 4; expected (model, args)"),
        ("not_callable", "returned a int as model"),
        ("one_tensor", "returned a Tensor as args"),
        ("nothing", "expected one that it defines: model, function"),
    ],
)
def test_a_factory_that_is_none_is_refused(
    shop: str, factory: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", f"{shop}:{factory}"]) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.startswith("error: ")
    assert words in captured.err


def test_a_wrong_policy_is_an_error_of_one_line(shop: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", f"{shop}:model", "--policy", "nonsense"]) == 2
    assert "policy entry 'nonsense' is neither" in capsys.readouterr().err


def test_the_module_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ampcompile"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=300, cwd=tmp_path, check=True)
    assert all(name in shown.stdout for name in ("explain", "audit", "bench", "doctor"))


@pytest.mark.slow
def test_bench_compiles_and_runs_what_it_names(shop: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "bench", f"{shop}:model", "--seconds", "0.5", "--json"))
    assert found["work"] == "training" and not any(c["failed"] for c in found["candidates"])
