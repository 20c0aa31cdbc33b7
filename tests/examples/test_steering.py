"""What the steering examples show is so."""

import pytest
import torch

from ampcompile.insight.report import Report
from examples.steering import all_casts, boxes_in_float32, decorators, overrides, softmax_layers

LOW, HALF, HIGH = torch.bfloat16, torch.float16, torch.float32


def dtypes(report: Report, *names: str) -> list[tuple[str, torch.dtype | None]]:
    return [(op.module, op.dtype) for op in report.ops if op.op.removeprefix("aten.") in names]


def test_linear_linear_softmax() -> None:
    report = softmax_layers.by_default()
    assert dtypes(report, "linear", "softmax") == [("0", LOW), ("1", LOW), ("2", LOW)]
    assert all("lower_precision_fp list (CPU)" in op.because for op in report.ops[:2])
    assert report.ops[2].because == "autocast leaves it alone: runs in the dtypes that arrive"
    ruled = softmax_layers.softmax_in_float32().ops[2]
    assert (ruled.dtype, ruled.because) == (HIGH, "policy: op softmax=fp32")


def test_all_casts_of_a_captured_model() -> None:
    casts = all_casts.captured().casts
    assert [(cast.of, cast.module, cast.dtype_to) for cast in casts] == [
        ("input", "project", LOW),
        ("weight", "project", LOW),
        ("bias", "project", LOW),
        ("activation", "norm", HIGH),
        ("activation", "qkv", LOW),
        ("weight", "qkv", LOW),
        ("bias", "qkv", LOW),
        ("activation", "", HIGH),  # what leaves the model
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32])
def test_an_imported_class_in_float32(dtype: torch.dtype) -> None:
    rois = boxes_in_float32.boxes(dtype)
    for pool in (boxes_in_float32.Wrapped, boxes_in_float32.Subclassed):
        report = boxes_in_float32.explained(pool, rois)
        inside = [op for op in report.ops if op.module == "pool"]
        assert ("backbone", HALF) in dtypes(report, "conv2d")
        assert {op.dtype for op in inside if op.dtype and op.dtype.is_floating_point} == {HIGH}
        assert "aten.to" in {op.op for op in inside}, "the features are raised"
        assert not [cast for cast in report.casts if cast.module == "pool"], "nothing is lowered"
        assert boxes_in_float32.error(pool, rois) < 1e-5
    assert boxes_in_float32.error(boxes_in_float32.RoIPool, rois) > 1e-2


@pytest.mark.parametrize("example", [softmax_layers, all_casts, boxes_in_float32, decorators, overrides])
def test_it_runs(example, capsys) -> None:
    example.main()
    assert "torch.float32" in capsys.readouterr().out
