"""Older pickles find their classes under the names that modules had."""

import importlib
import pickle
import sys

import pytest

import ampcompile
from ampcompile import moved
from ampcompile.auditing.numbers import Numbers


@pytest.mark.parametrize("old", moved.MOVED)
def test_a_name_of_old_gives_what_its_module_has_now(old: str) -> None:
    now = importlib.import_module(f"ampcompile.{moved.MOVED[old]}")
    before = importlib.import_module(f"ampcompile.{old}")
    assert before is sys.modules[f"ampcompile.{old}"] and moved.MOVED[old] in (before.__doc__ or "")
    classes = [name for name, value in vars(now).items() if isinstance(value, type)]
    assert classes and all(getattr(before, name) is getattr(now, name) for name in classes)
    with pytest.raises(AttributeError):
        _ = before.no_such_name
    assert not hasattr(before, "__path__")


def test_a_pickle_of_old_is_read() -> None:
    numbers = Numbers(0.5, None, 1.0, 0.0, 0.0, 3)
    old = pickle.dumps(numbers, protocol=0).replace(b"ampcompile.auditing.numbers", b"ampcompile.audit_numbers")
    assert b"audit_numbers" in old and pickle.loads(old) == numbers


def test_modules_that_are_there_stay() -> None:
    before = {name: sys.modules[f"ampcompile.{name}"] for name in moved.MOVED}
    moved.install()
    assert all(sys.modules[f"ampcompile.{name}"] is module for name, module in before.items())
    assert ampcompile.__name__ == "ampcompile"
