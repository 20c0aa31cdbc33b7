"""Trainings of the proof with fewer steps."""

import pytest

from proof.convergence import masters, states, subjects


def shorten(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    for module in (subjects, states, masters):
        monkeypatch.setattr(module, "STEPS", steps, raising=False)
