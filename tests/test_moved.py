"""What earlier states of the package pickled loads: tests/older holds what they wrote, before files became rooms."""

import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompile import GradScaler, Policy
from ampcompile.moved import MOVED


def older(name: str) -> Any:
    return pickle.loads((Path(__file__).with_name("older") / f"{name}.pkl").read_bytes())


def test_a_policy() -> None:
    assert older("policy") == Policy.parse("op softmax=fp32")


def test_a_scaler() -> None:
    scaler = older("scaler")
    assert isinstance(scaler, GradScaler) and scaler.get_scale() == 1024 and scaler.state_dict()["scale"] == 1024


def test_a_report() -> None:
    report = older("report")
    assert len(report.casts) == 6 and {op.op for op in report.ops} == {"aten.linear", "aten.layer_norm"}
    assert "aten.layer_norm" in str(report) and "def forward" in report.code


def test_a_module_kept_in_float32() -> None:
    module = older("module")
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.ones(1, 2)).dtype is torch.float32


def test_every_older_module_has_its_names() -> None:
    for old in MOVED:
        assert __import__(f"ampcompile.{old}", fromlist=["x"]).__name__ == f"ampcompile.{old}"


@pytest.mark.parametrize("old", MOVED)
def test_a_name_of_old_gives_what_its_module_has_now(old: str) -> None:
    now, before = (importlib.import_module(f"ampcompile.{name}") for name in (MOVED[old], old))
    classes = [name for name, value in vars(now).items() if isinstance(value, type)]
    assert classes and all(getattr(before, name) is getattr(now, name) for name in classes)
    with pytest.raises(AttributeError):
        _ = before.no_such_name
