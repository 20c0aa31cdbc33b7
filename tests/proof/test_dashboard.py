"""PyTorch's benchmark scripts, in their place scripts of a few lines: what is asked of them, and what becomes of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from proof.dashboard import launch, sweep
from proof.results import Verdict

SCRIPT = """
import argparse, sys
options = argparse.ArgumentParser()
for name in ("device", "backend", "only", "batch-size", "repeat", "threads", "output-directory", "output"):
    options.add_argument(f"--{name}")
for name in ("accuracy", "performance", "inference", "training", "amp", "freezing"):
    options.add_argument(f"--{name}", action="store_true")
found = options.parse_args()
assert found.amp and found.device == "cpu"
if found.backend == "amp" and found.training:
    sys.exit("no memory")
with open(f"{found.output_directory}/{found.output}", "w") as file:
    file.write("name,speedup,abs_latency,accuracy\\n" f"{found.only},{1.5 + found.freezing},2,pass\\n")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "pytorch" / "benchmarks" / "dynamo"
    folder.mkdir(parents=True)
    (folder / "common.py").touch()
    (folder / "huggingface.py").write_text(SCRIPT)
    (tmp_path / "pytorch" / "version.txt").write_text("2.4.0\n")
    return folder


def test_backends_are_run_in_turn_and_what_dies_has_no_speed(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sweep, "LAUNCHER", sweep.LAUNCHER[:1])
    monkeypatch.setenv("DYNAMO_BENCHMARKS", str(checkout))
    found = {mode: sweep.run(f"T5Small, {mode}, run 1").figures for mode in sweep.WAYS}
    assert list(found["inference"].items()) == [
        ("inductor", [1.5, 2]),
        ("inductor_freezing", [2.5, 2]),
        ("amp", [1.5, 2]),
    ]
    assert found["training"] == {"inductor": [1.5, 2], "amp": [0, 0], "amp_every_call": [1.5, 2]}
    assert "no memory" in capsys.readouterr().err
    assert sweep.run("T5Small, training, run 2").figures.keys() == {*sweep.COMPARED}
    assert sweep.run("T5Small, training, accuracy").counts == {"inductor: pass": 1, "amp: fail_to_run": 1}
    monkeypatch.setattr("importlib.metadata.version", lambda _: "9")
    assert "timm 9, 1 thread; scripts of PyTorch 2.4.0" in sweep.facts()["with"]


def test_groups_are_runs_and_accuracies_and_all_are_more() -> None:
    few, everything = sweep.groups(False), sweep.groups(True)
    assert set(few) < set(everything) and len(set(everything)) == 3 * len(few)


def test_what_is_missing_is_told(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "sparse-checkout" in sweep.missing()
    monkeypatch.setenv("DYNAMO_BENCHMARKS", str(checkout))
    monkeypatch.setattr(sweep, "NEEDED", ("numpy", "no_such_package"))
    assert sweep.missing().endswith("python -m pip install no_such_package")


def test_the_page_has_ratios_of_neighbours_and_their_mean() -> None:
    timed: dict[str, dict[str, tuple[int, ...]]] = {
        "T5Small": {"inductor": (1, 2, 1), "inductor_freezing": (5,), "amp": (2, 6, 4)},
        "DistillGPT2": {"inductor": (1,), "amp": (0,)},
        "ElectraForCausalLM": {"inductor": (1,)},
        "MT5ForConditionalGeneration": {"inductor": (2,), "amp": (1,)},
    }
    found = [
        Verdict(
            f"{model}, inference, run {n}",
            figures={way: [times[n - 1], 12 / (times[n - 1] or 1)] for way, times in ways.items() if len(times) >= n},
        )
        for model, ways in timed.items()
        for n in (1, 2, 3)
    ]
    page = sweep.tabulate([*found, Verdict("T5Small, inference, accuracy", {"amp: pass": 1})])
    assert "Inference" not in sweep.tabulate([])
    assert "| T5Small | 3.00 | 3.00 | 1.00 | 5.00 | 4.00 | 3 | not run | pass |" in page
    assert "| DistillGPT2 | none | none | 1.00 | none | none | 1 | not run | not run |" in page
    assert "| geometric mean (of) | 1.22 (2) | 1.22 (2) | 1.26 (3) | 5.00 (1) | 2.00 (2) |  |  |  |" in page
    assert "- MT5ForConditionalGeneration in inference: not known yet.\n" in page
    table, _, rest = page.partition("left out")
    assert "Electra" not in table, "nothing to compare it with"
    assert "ElectraForCausalLM" in rest.partition("not run yet: ")[2]


def test_what_is_timed_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch._dynamo.run` would run a function of amp's as it is."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        with torch.autocast("cpu"):
            return x @ x, torch.compiler.is_compiling()

    monkeypatch.setitem(launch.BACKENDS["amp"]["options"], "lower", "eager")
    x = torch.ones(2, 2)
    result, is_compiled = launch.optimize(torch._dynamo.optimize, "amp", nopython=False)(function)(x)
    assert is_compiled
    assert result.dtype == torch.bfloat16
    assert launch.run(function)(x)[1]
    assert not launch.run(function)(torch.ones(3, 2, 2))[1], "nothing is compiled while time is taken"
    assert not torch._dynamo.run(function)(x)[1], "the launcher needs no `run` of its own any more"


def test_models_are_built_without_a_hub_and_without_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", None)
    monkeypatch.setattr(transformers.PreTrainedModel, "__init__", transformers.PreTrainedModel.__init__)
    known: set[Any] = set()
    with torch._dynamo.config.patch(ignore_logging_functions=known):
        launch.adapt_transformers()
    config = transformers.AutoConfig.from_pretrained("distilgpt2")
    assert config.n_layer == 6
    config.n_embd, config.n_head, config.vocab_size = 8, 2, 16
    assert not transformers.AutoModelForCausalLM.from_config(config).config.use_cache
    assert known
