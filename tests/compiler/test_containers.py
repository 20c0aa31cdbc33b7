"""Containers are taken apart and made again with other parts, as objects of their own; what can't be is an error."""

from collections import ChainMap, Counter, UserDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from ampcompile.compiler import widen_nested
from ampcompile.compiler.containers import parts_of, with_parts
from ampcompile.errors import AmpWarning
from tests.compiling import HIGH, LOW

OLD, NEW, OTHER = (torch.ones(2) for _ in range(3))


class Pair(tuple):
    """With a constructor of its own."""

    def __new__(cls, first: Any, second: Any) -> "Pair":
        made = super().__new__(cls, (first, second))
        made.note = "kept"
        return made


@dataclass
class Plain:
    first: Any
    second: Any = OTHER
    missing: Any = field(init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    first: Any
    second: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "second", OTHER)


class ReadOnly(Mapping):
    """Of the user's."""

    def __init__(self, **items: Any) -> None:
        self.held = items

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class Sealed(dict):
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("sealed")


class Single(list):
    def __copy__(self) -> "Single":
        return self


class Unreadable(ReadOnly):
    def __getitem__(self, key: str) -> Any:
        raise OSError("gone")


class Unusual(set):
    def __init__(self, *items: Any) -> None:
        super().__init__(items)


REBUILT = [
    lambda: (OLD, OTHER),
    lambda: [OLD, OTHER],
    lambda: {"first": OLD, "second": OTHER},
    lambda: Pair(OLD, OTHER),
    lambda: torch.return_types.max((OLD, OTHER)),
    lambda: nn.utils.rnn.PackedSequence(OLD, OTHER),
    lambda: deque([OLD, OTHER], maxlen=2),
    lambda: {OLD, OTHER},
    lambda: frozenset({OLD, OTHER}),
    lambda: UserDict(first=OLD, second=OTHER),
    lambda: ChainMap({"first": OLD}, {"second": OTHER}),
    lambda: MappingProxyType({"first": OLD, "second": OTHER}),
    lambda: Plain(OLD),
    lambda: Frozen(OLD),
    lambda: CausalLMOutput(loss=OLD, logits=OTHER),
]
LEFT = [
    lambda part: ReadOnly(first=part),
    lambda part: Sealed(first=part),
    lambda part: Single([part]),
    lambda part: Unusual(part, OTHER),
]


def replaced(value: Any, in_place: bool = False) -> Any:
    parts = parts_of(value)
    changed = {key: NEW for key, part in parts.items() if part is OLD}
    assert len(changed) == 1
    return with_parts(value, parts, changed, in_place)


def held(value: Any) -> list[Any]:
    return sorted(map(id, parts_of(value).values()))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("make", REBUILT)
def test_the_same_container_with_another_part(make: Any, in_place: bool) -> None:
    value = make()
    before = held(value)
    made = replaced(value, in_place)
    assert type(made) is type(value)
    assert held(made) == sorted(id(NEW) if part == id(OLD) else part for part in before)
    assert made is value or held(value) == before, "what isn't changed in place isn't changed at all"
    assert in_place or made is not value


def test_what_belongs_to_the_object_stays_with_its_copy() -> None:
    assert replaced(Pair(OLD, OTHER)).note == "kept"
    assert replaced(deque([OLD, OTHER], maxlen=2)).maxlen == 2
    assert not hasattr(replaced(Plain(OLD)), "missing")
    assert replaced(CausalLMOutput(loss=OLD, logits=OTHER)).loss is NEW


@pytest.mark.parametrize("make", LEFT)
def test_what_gives_no_copy_is_an_error_and_stays(make: Any) -> None:
    value = make(OLD)
    before = held(value)
    with pytest.raises(TypeError):
        replaced(value)
    assert held(value) == before


def test_other_objects_hold_nothing() -> None:
    for value in (3, "text", None, torch.Size, Plain, range(3), object()):
        assert parts_of(value) == {}
    assert parts_of(torch.Size([2, 3])) == {0: 2, 1: 3} and parts_of(Counter("a")) == {"a": 1}


@pytest.mark.parametrize("make", [*LEFT, lambda part: Unreadable(first=part)])
def test_a_call_returns_what_cant_be_rebuilt_as_it_is_with_one_warning(make: Any) -> None:
    value, layer = make(torch.ones(2, dtype=LOW)), nn.Linear(2, 2)
    widen_nested._warned.discard(type(value))

    def f(x: torch.Tensor, given: Any) -> Any:
        torch._dynamo.graph_break()
        return {"given": given, "plain": layer(x)}

    run = torch.compile(f, backend="amp", options={"lower": "eager"})
    with pytest.warns(AmpWarning, match=f"found a {type(value).__name__} among the results") as said:
        result = run(torch.randn(2, 2), value)
    assert said[0].filename == __file__ and "return another container" in str(said[0].message)
    assert result["given"] is value and result["plain"].dtype == HIGH
    assert run(torch.randn(2, 2), value)["given"] is value, "without a word"
    if not isinstance(value, Unreadable):
        assert LOW in [part.dtype for part in parts_of(value).values()]
