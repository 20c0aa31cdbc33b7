"""PyTorch's benchmark scripts, in their place scripts of a few lines: what is asked of them, and what becomes of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from proof.dashboard import chapter, launch, run

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
    file.write("dev,name,batch_size,speedup\\n" f"cpu,{found.only},{found.batch_size},{1.5 + found.freezing}\\n")
"""
FACTS = {
    "processor": "a processor", "low-precision instructions": [], "system": "a system", "python": "3", "torch": "2",
    "packages": {"timm": "", "transformers": "5"}, "scripts": "2.4.0", "batch size": 1, "iterations": 5,
    "commit": "abc",
}  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "pytorch" / "benchmarks" / "dynamo"
    folder.mkdir(parents=True)
    (folder / "common.py").touch()
    (folder / "huggingface.py").write_text(SCRIPT)
    (tmp_path / "pytorch" / "version.txt").write_text("2.4.0\n")
    return folder


def test_backends_are_run_in_turn_and_compared_ones_again_and_what_dies_is_a_line_too(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    asked: list[str] = []
    line_of = run.line_of
    monkeypatch.setattr(run, "missing", lambda *_: "")
    monkeypatch.setattr(run, "LAUNCHER", run.LAUNCHER[:1])
    monkeypatch.setattr(run, "line_of", lambda each, *rest: asked.append(each.way) or line_of(each, *rest))
    arguments = ["--checkout", str(checkout), "--results", str(tmp_path), "--only", "T5Small", "--kinds", "performance"]
    for _ in range(2):
        assert run.main([*arguments, "--repeats", "2"]) == 0
    assert asked == [*(way for ways in run.WAYS.values() for way in ways), *run.COMPARED, *run.COMPARED]
    speedups = {path.stem: [line["speedup"] for line in run.read(path)] for path in tmp_path.glob("*.csv")}
    assert speedups == {
        "huggingface_performance_inference_inductor": ["1.5", "1.5"],
        "huggingface_performance_inference_inductor_freezing": ["2.5"],
        "huggingface_performance_inference_amp": ["1.5", "1.5"],
        "huggingface_performance_training_inductor": ["1.5", "1.5"],
        "huggingface_performance_training_amp": ["0.000000", "0.000000"],
        "huggingface_performance_training_amp_every_call": ["1.5"],
    }
    assert json.loads((tmp_path / "about.json").read_text())["scripts"] == "2.4.0"


def test_what_is_missing_is_told(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "sparse-checkout" in run.missing(None, "")
    monkeypatch.setattr(run, "NEEDED", {"huggingface": ("numpy", "no_such_package")})
    assert run.missing(checkout, "T5Small").endswith("python -m pip install no_such_package")
    assert run.main(["--checkout", str(checkout), "--only", "T5Small"]) == 2


def test_the_page_has_ratios_of_neighbours_and_their_mean(tmp_path: Path) -> None:
    (tmp_path / "about.json").write_text(json.dumps(FACTS))
    assert "Inference" not in "".join(chapter.chapter(tmp_path))
    found = {
        "T5Small": {"inductor": (1, 2, 1), "inductor_freezing": (5, 5, 8), "amp": (2, 6, 4)},
        "DistillGPT2": {"inductor": (1,), "amp": (0,)},
        "ElectraForCausalLM": {"inductor": (1,)},
        "MT5ForConditionalGeneration": {"inductor": (2,), "amp": (1,)},
    }
    for model, ways in found.items():
        for way, speedups in ways.items():
            path = run.Run("performance", "inference", way, "huggingface", model).path(tmp_path)
            for speedup in speedups:
                run.add(path, {"name": model, "speedup": str(speedup), "abs_latency": str(12 / (speedup or 1))})
    path = run.Run("accuracy", "inference", "amp", "huggingface", "T5Small").path(tmp_path)
    run.add(path, {"name": "T5Small", "accuracy": "pass"})
    page = "".join(chapter.chapter(tmp_path))
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
