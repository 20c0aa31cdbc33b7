"""The way of a warm step through our modules: few, and seldom back to a room that it has left."""

import sys
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import nn

import ampcompile
from ampcompile.weights import reports
from ampcompile.weights.store import store


def modules_called(call: Callable[[], object]) -> list[str]:
    """Return the module of each of our functions that a call calls, in turn."""
    names: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and (name := frame.f_globals.get("__name__", "")).startswith("ampcompile."):
            names.append(name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.parametrize(("kind", "scaled", "most"), [("ours", False, 12), ("ours", True, 15), ("torch's", True, 15)])
def test_a_warm_step_crosses_few_modules_and_seldom_comes_back_to_a_room(
    kind: str, scaled: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports.drop_failed_steps()  # of other tests: a step looks whether it is called from one of them
    monkeypatch.setattr(store, "keys", frozenset())  # and whether there are copies of its weights
    params = [nn.Parameter(torch.randn(8, 8)) for _ in range(5)]
    optimizer = (ampcompile if kind == "ours" else torch).optim.AdamW(params)
    scaler = ampcompile.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    names = []
    for _ in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        names = modules_called((lambda: scaler.step(optimizer)) if scaled else optimizer.step)
        if scaled:
            scaler.update()
    rooms = [room for room, _ in groupby(name.split(".")[1] for name in names)]
    assert 5 < len(set(names)) <= most, sorted(set(names))
    assert len(rooms) - len(set(rooms)) <= 7, rooms
