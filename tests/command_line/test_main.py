"""The command line: what it prints, what it refuses. The commands run in this process, on factories defined here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampcompile.command_line import bench as cli_bench
from ampcompile.command_line import doctor as cli_doctor
from ampcompile.command_line import main as cli
from ampcompile.command_line.bench import Results, Times, bench
from ampcompile.command_line.target import Target, load
from ampcompile.errors import CommandLineError
from ampcompile.torch_private import patches

FACTORIES = """
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), (torch.randn(4, 8),)


def function():
    return (lambda x, scale: x @ x.mT * scale), [torch.randn(4, 8)], {"scale": 2.0}


def overflowing():
    return (lambda x: x * 6e4 * 6e4 @ x.mT), (torch.ones(4, 8).half(),)


def number():
    return 3


def four():
    return 1, 2, 3, 4


def not_callable():
    return 1, ()


def one_tensor():
    return nn.Linear(8, 8), torch.randn(4, 8)


def breaks():
    raise ZeroDivisionError("the factory's own")
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"shop_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


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


def test_other_spellings_are_refused_and_other_errors_go_through(shop: str) -> None:
    for spelling in ("shop", ":model", "shop:"):
        with pytest.raises(CommandLineError, match=r"expected PACKAGE\.MODULE:FACTORY"):
            load(spelling)
    with pytest.raises(CommandLineError, match="found no module 'no_such_module'; expected one"):
        load("no_such_module.inside:model")
    with pytest.raises(ZeroDivisionError, match="the factory's own"):
        load(f"{shop}:breaks")


def test_a_wrong_policy_is_an_error_of_one_line(shop: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", f"{shop}:model", "--policy", "nonsense"]) == 2
    assert "policy entry 'nonsense' is neither" in capsys.readouterr().err


class _Eager:
    """torch.compile without a compiler: what is tested here is the race."""

    def __init__(self, f: Any, **_: Any) -> None:
        self.f = f

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.f(*args, **kwargs)


def test_bench_times_every_candidate_and_leaves_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(4, 8)
    seen: list[tuple[bool, bool]] = []
    model.register_forward_hook(lambda *_: seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))))
    monkeypatch.setattr(torch, "compile", _Eager)
    statistics = model[1].running_mean.clone()
    results = bench(Target(model, (x,), {}), {}, True, seconds=0.01)
    assert results.work == "training" and results.dtype == "bf16"
    assert [c.name for c in results.candidates] == ["eager autocast", "Inductor with autocast", "amp"]
    assert all(len(c.seconds) >= cli_bench.ROUNDS and c.median > 0 and not c.failed for c in results.candidates)
    assert {(True, True), (True, False)} == set(seen)
    assert all(p.grad is None for p in model.parameters()) and torch.equal(statistics, model[1].running_mean)
    seen.clear()
    assert bench(Target(model.eval(), (x,), {}), {}, True, seconds=0.01).work == "inference"
    assert {grad for grad, _ in seen} == {False}


def test_a_candidate_that_fails_says_so_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(_Eager):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(torch, "compile", Broken)
    results = bench(Target(nn.Linear(8, 8), (torch.randn(4, 8),), {}), {}, True, seconds=0.01)
    assert [c.failed for c in results.candidates] == ["", *["RuntimeError: no compiler"] * 2]
    assert "amp failed: RuntimeError: no compiler" in cli_bench.table(results).splitlines()


def test_the_table_of_a_race_compares_with_eager_autocast() -> None:
    times = (Times("eager autocast", 0.1, [0.2, 0.4, 0.3]), Times("amp", 2.0, [0.1, 0.15, 0.2]))
    table = cli_bench.table(Results("inference", "cpu", "bf16", times))
    row = next(line for line in table.splitlines() if line.startswith("amp"))
    assert row.split() == ["amp", "150", "ms", "100", "to", "200", "2.00", "2.0", "s"]


def test_doctor_measures_and_advises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_doctor, "_WIDTH", {"cpu": 32})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = cli_doctor.examine(rounds=3)
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0]["device"] == "cpu" and found["devices"][0]["threads"] == torch.get_num_threads()
    assert {p["work"]: p["shape"][0] for p in found["products"]} == {"one row": 1, "many rows": 1024}
    assert all(seconds > 0 for p in found["products"] for seconds in p["seconds"].values())
    assert len(found["advice"]) == 3 and "low precision" in found["advice"][0]
    json.dumps(found)
    text = cli_doctor.table(found)
    assert torch.__version__ in text and found["advice"][0] in text
    assert all(group.name in text and group.when in text for group in patches.TABLE)
    assert "torch.Tensor.data" in [patch["what"] for group in found["patches"] for patch in group["patches"]]


@pytest.mark.parametrize(
    ("gain", "words"),
    [(2.0, "2 times as fast as float32; low precision is likely to pay"), (0.25, "4 times as slow"), (1.1, "a little")],
)
def test_advice_follows_what_was_measured(gain: float, words: str) -> None:
    product = {"device": "cpu", "work": "many rows", "seconds": {"f32": 1.0, "bf16": 1 / gain, "f16": 1.0}}
    line, width = cli_doctor._advice("cpu", [product])
    assert words in line and "square product" in width


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(cli_doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(patches, "missing", lambda: [patches.Patch("torch.Tensor.gone", "made up")])
    words = cli_doctor._missing(cuda=True)
    assert len(words) == 3 and "no C++ compiler" in words[0] and "no triton" in words[1]
    assert "torch.Tensor.gone: torch" in words[2]


def test_the_module_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ampcompile"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=300, cwd=tmp_path, check=True)
    assert all(name in shown.stdout for name in ("explain", "audit", "bench", "doctor"))


@pytest.mark.slow
def test_bench_compiles_and_runs_what_it_names(shop: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "bench", f"{shop}:model", "--seconds", "0.5", "--json"))
    assert found["work"] == "training" and not any(c["failed"] for c in found["candidates"])
