"""A recording holds every op beside float64, and a file holds data alone."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import ampcompile
from ampcompile.errors import AuditError
from ampcompile.insight.recording import Recording, Returned
from ampcompile.insight.run import fingerprint
from ampcompile.records.graphs import Numbers
from tests.insight.made_up import op
from tests.insight.models import mean_square
from tests.models import Block


def test_ops_inputs_and_results_are_recorded() -> None:
    model, x = nn.Sequential(Block(), nn.BatchNorm1d(8), nn.Dropout(0.5)), torch.randn(4, 8)
    recording = ampcompile.record(model, loss=mean_square, lower="aot_eager")(x)
    named = [step.op for step in recording.steps]
    assert {"input 0.up.weight", "aten.addmm", "aten.native_batch_norm_backward"} <= set(named)
    assert set(recording.results) == {"output 0", *(f"gradient of {name}" for name, _ in model.named_parameters())}
    assert all(r.call == pytest.approx(r.ops, rel=0.1, abs=1e-6) for r in recording.results.values()), "the same mask"
    product = recording.steps[named.index("aten.addmm")]
    weight = recording.steps[int(product.reads[-1])].reads
    assert (product.dtype, product.shape, product.length) == (torch.bfloat16, (4, 16), 8)
    assert [named[int(i)] for i in weight] == ["input 0.up.weight"]
    about = recording.about
    assert (about["callable"], about["run"], about["option lower"]) == ("Sequential", "compiled", "aot_eager")


def test_eager_autocast_is_recorded_with_its_own_casts() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    recording = ampcompile.record(model, eager=True, policy="module *=fp32", backward=False)(x)
    assert [s.dtype for s in recording.steps if s.op == "aten.addmm"] == [torch.bfloat16], "policies are ours alone"
    with torch.autocast("cpu", torch.bfloat16):
        exact = model(x).double() - (x.bfloat16().double() @ model.weight.bfloat16().double().T)
    assert exact.isfinite().all() and recording.about["run"] == "eager autocast"
    assert recording.results["output 0"].call == recording.results["output 0"].ops


def test_a_fingerprint_is_that_of_the_numbers() -> None:
    x = torch.randn(8, 8, 4)
    assert fingerprint(x) == fingerprint(x.permute(1, 0, 2).contiguous().permute(1, 0, 2))
    assert fingerprint(torch.tensor([1.0, math.inf, math.nan])) == fingerprint(torch.tensor([1.0, 0, 0]))
    assert fingerprint(torch.tensor([1 + 2j])) == fingerprint(torch.tensor([1, 2]))
    assert fingerprint(torch.tensor([3, 0, 4])) == pytest.approx((5, 3 + 4 * math.cos(2))), "the same on every machine"


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    step = op(
        "aten.mm",
        module="a.b",
        backward=True,
        dtype=torch.bfloat16,
        shape=(2, 3),
        fingerprint=(1.0, 0.1),
        numbers=Numbers(1e-3, None),
        length=4.0,
        reads=("0", "1"),
    )
    recording = Recording({"torch": "2"}, [step], {"output 0": Returned(1e-3, math.nan, 6)})
    recording.save(tmp_path / "run.json")
    assert repr(Recording.load(tmp_path / "run.json")) == repr(recording)
    steps, results = (part.splitlines() for part in str(recording).split("\n\n"))
    assert steps[1].split() == ["aten.mm", "(backward)", "a.b", "model.py:3", "bf16", "2x3", "1.0e-03"]
    assert results[1].split() == ["output", "0", "1.0e-03", "not", "finite"]


@pytest.mark.parametrize("text", ['{"format": "another"}', "[]", "\x80\x04", '{"format": "ampcompile recording 3"}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(AuditError, match="no recording that this version reads"):
        Recording.load(tmp_path / "x.json")
