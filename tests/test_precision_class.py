"""A subclass with another forward: under the same name, with pickles that find it, and never its own parent."""

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ampcompile.precision_class import subclass_with


class Plain(nn.Module):
    """Says its width."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.width = width

    def forward(self) -> str:
        return f"plain {self.width}"


def marked(cls: type) -> type:
    """Decorates a class; found by its name where a pickle is read."""
    forward: Callable[..., str] = cls.forward  # type: ignore[attr-defined]
    return subclass_with(cls, marked, lambda self: f"marked {forward(self)}")


Marked = marked(Plain)


@marked
class Decorated(nn.Module):
    def __init__(self) -> None:
        super(Decorated, self).__init__()  # noqa: UP008
        self.width = 5

    def forward(self) -> str:
        return f"decorated {self.width}"


def test_it_has_the_name_and_the_words_of_the_class_that_stays_as_it_was() -> None:
    assert (Marked.__name__, Marked.__qualname__, Marked.__module__, Marked.__doc__) == (
        Plain.__name__,
        Plain.__qualname__,
        Plain.__module__,
        "Says its width.",
    )
    assert issubclass(Marked, Plain) and Marked is not Plain
    assert (Marked(4)(), Plain(4)()) == ("marked plain 4", "plain 4")


def test_a_class_that_names_itself_in_super_is_changed_in_place() -> None:
    assert Decorated.__mro__[1] is nn.Module
    assert Decorated()() == "marked decorated 5"


def test_a_class_that_names_itself_is_subclassed_once_its_name_is_bound() -> None:
    twice: Any = marked(Decorated)
    assert twice.__mro__[1] is Decorated and twice()() == "marked marked decorated 5"


def test_pickles_come_back_as_the_subclass_with_their_state() -> None:
    module = Marked(4)
    module.register_buffer("table", torch.ones(2))
    back = pickle.loads(pickle.dumps(module))
    assert type(back).__mro__[1] is Plain and type(back) is not Plain
    assert back() == "marked plain 4" and torch.equal(back.table, torch.ones(2))
    again = pickle.loads(pickle.dumps(back))
    assert again() == "marked plain 4", "marked once"
    assert pickle.loads(pickle.dumps(Decorated()))() == "marked decorated 5"
    assert pickle.loads(pickle.dumps(Plain(2)))() == "plain 2"
