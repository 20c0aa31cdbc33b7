"""Every field of every cast is filled, and names the right module and line, in models of other people."""

import ast
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import ampcompile
from ampcompile.insight.report import Report
from ampcompile.records.graphs import CastRecord, OpRecord
from tests.tiny_models import build, loss

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
MODELS = ["llama", pytest.param("t5", marks=pytest.mark.ci)]
MODELS += [pytest.param(name, marks=pytest.mark.slow) for name in ("resnet", "whisper")]


@pytest.fixture(scope="module", params=MODELS)
def explained(request: pytest.FixtureRequest) -> tuple[nn.Module, Report]:
    model, inputs = build(request.param)
    return model, ampcompile.explain(lambda: loss(model, inputs), lower="eager")()


def is_filled(cast: CastRecord) -> bool:
    return (
        bool(cast.op and cast.because and cast.source and cast.fate)
        and cast.fate[0] == "inserted"
        and cast.dtype_from != cast.dtype_to
        and cast.of in ("weight", "bias", "input", "constant", "activation")
        and cast.bytes == torch.Size(cast.shape).numel() * (cast.dtype_from.itemsize + cast.dtype_to.itemsize)
    )


def is_right_module(cast: CastRecord, modules: dict[str, nn.Module]) -> bool:
    """A weight is cast where the module that owns it stands; any other value for an op that stands in a module."""
    owned = [tuple(p.shape) for p in modules[cast.module].parameters()] if cast.module in modules else []
    return cast.shape in owned if cast.of in ("weight", "bias") else cast.module in modules


def is_right_line(record: CastRecord | OpRecord, modules: dict[str, nn.Module]) -> bool:
    """In the class of the module, or of the nearest around it that isn't torch's own, or in a function it may call."""
    path, _, line = record.source.rpartition(":")
    parts = record.module.split(".") if record.module else []
    around = (type(modules[".".join(parts[:depth])]) for depth in range(len(parts), -1, -1))
    kind = next(kind for kind in around if not kind.__module__.startswith("torch."))
    return written_in(Path(path), int(line)) in (kind.__name__, *(c.__name__ for c in kind.__mro__), "a function")


@cache
def top_level(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text()).body


def written_in(path: Path, line: int) -> str:
    """The name of the class around a line, or that it is in a function."""
    for node in top_level(path):
        if node.lineno <= line <= (node.end_lineno or 0):
            return node.name if isinstance(node, ast.ClassDef) else "a function"
    return "nothing"


def test_casts_are_filled_and_placed(explained: tuple[nn.Module, Report]) -> None:
    model, report = explained
    modules = dict(model.named_modules())
    assert len(report.casts) >= 10
    assert all(is_filled(cast) for cast in report.casts)
    right = [is_right_module(cast, modules) and is_right_line(cast, modules) for cast in report.casts]
    assert sum(right) >= 0.95 * len(right), [c for c, ok in zip(report.casts, right, strict=True) if not ok]


def test_every_op_has_a_reason_and_a_line(explained: tuple[nn.Module, Report]) -> None:
    model, report = explained
    modules = dict(model.named_modules())
    assert all(op.op and op.because for op in report.ops)
    right = [op.module in modules and is_right_line(op, modules) for op in report.ops]
    assert sum(right) >= 0.95 * len(right), [op for op, ok in zip(report.ops, right, strict=True) if not ok]
    assert report.unknown_ops == []
