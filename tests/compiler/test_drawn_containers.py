"""Drawn containers of drawn tensors leave a compiled call as the rule says, in the first call and in later ones.

The rule. Of what an outermost call returns outside of autocast,
 1. a tensor that the call computed in its 16-bit type leaves in float32, with the same numbers,
 2. also if it is a leaf, a view of another that was computed, or held by something else too;
 3. what came in, at any depth, is itself: arguments and what they hold, also if it was taken out of them;
 4. so are parameters and buffers, of the module and of modules among the arguments;
 5. a view of what came in, of a parameter or buffer, keeps its type and its memory;
 6. tensors of other types, and values that are no tensors, are themselves.
 7. A container in which a part changes is a copy of its class, with the same other parts and attributes;
 8. one in which nothing changes is itself, and so is each that came in, whatever was put into it meanwhile.
 9. What occurs twice occurs twice: one tensor or container stands in both places.
10. Containers that can't be copied, in which a part would change, are themselves, with a warning.
"""

import random
import warnings
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput

from ampcompile.errors import AmpWarning
from tests.compiling import HIGH, LOW

Named = namedtuple("Named", "a b")


class Boxes(list):
    """Counts what is put into it, by its constructor too."""

    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.count = 0
        for part in parts:
            self.append(part)

    def append(self, part: Any) -> None:
        self.count += 1
        super().append(part)


class Pair(tuple):
    """Has another constructor than tuple."""

    def __new__(cls, first: Any, *others: Any) -> "Pair":
        return super().__new__(cls, (first, *others))

    def __init__(self, first: Any, *others: Any) -> None:
        self.first = first


class Options(dict):
    """A dict whose `items` makes other objects in every call."""

    def __init__(self, number: int, **items: Any) -> None:
        super().__init__(items)
        self.number = number

    def items(self) -> Any:
        return [(key, [value]) for key, value in super().items()]


class Own(nn.Module):
    """A module that holds a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.randn(2, 8, dtype=LOW))


@dataclass
class Record:
    value: Any
    more: Any = None


@dataclass(frozen=True, slots=True)
class Slotted:
    value: Any
    more: Any = None


@dataclass
class Output(ModelOutput):
    logits: Any = None
    more: Any = None


class Slots:
    __slots__ = ("value",)


class Cache:
    """Its registered flatten function makes the parts; so does each of its properties."""

    def __init__(self, keys: Any) -> None:
        self._layers = [SimpleNamespace(key=key) for key in keys]

    @property
    def keys(self) -> list[Any]:
        return [layer.key for layer in self._layers]


pytree.register_pytree_node(Cache, lambda cache: ([cache.keys], None), lambda parts, _: Cache(parts[0]))


class Kind(NamedTuple):
    """How a container is made of parts, and what its parts are."""

    make: Callable[[list[Any]], Any]
    parts: Callable[[Any], list[Any]]


def numbered(parts: list[Any]) -> dict[str, Any]:
    return {f"p{i}": part for i, part in enumerate(parts)}


def in_slots(parts: list[Any]) -> Slots:
    (made := Slots()).value = parts
    return made


COPIED = {
    "list": Kind(list, list),
    "tuple": Kind(tuple, list),
    "dict": Kind(numbered, lambda v: [*v.values()]),
    "ordered": Kind(
        lambda p: OrderedDict(reversed(numbered(p).items())),
        lambda v: [v[k] for k in reversed(v)] if [*v] == sorted(v, reverse=True) else [],
    ),
    "default": Kind(
        lambda p: defaultdict(list, numbered(p)), lambda v: [*v.values()] if v.default_factory is list else []
    ),
    "deque": Kind(lambda p: deque(p, maxlen=9), lambda v: [*v] if v.maxlen == 9 else []),
    "struct": Kind(lambda p: torch.return_types.max((p[0], p[1:])), lambda v: [v.values, *v.indices]),
    "named": Kind(lambda p: Named(p[0], p[1:]), lambda v: [v.a, *v.b]),
    "boxes": Kind(lambda p: Boxes(*p), lambda v: [*v, *[None] * (v.count != len(v))]),
    "pair": Kind(lambda p: Pair(*p), lambda v: [*v] if v.first is v[0] else [None]),
    "options": Kind(lambda p: Options(7, **numbered(p)), lambda v: [*v.values()] if v.number == 7 else []),
    "record": Kind(lambda p: Record(p[0], p[1:]), lambda v: [v.value, *v.more]),
    "slotted": Kind(lambda p: Slotted(p[0], p[1:]), lambda v: [v.value, *v.more]),
    "output": Kind(lambda p: Output(p, more=p[0]), lambda v: [*v.logits] if v.more is v[1] is v.logits[0] else []),
    "cache": Kind(Cache, lambda v: v.keys),
}
REFUSED = {
    "user": Kind(lambda p: UserDict(numbered(p)), lambda v: [*v.values()]),
    "proxy": Kind(lambda p: MappingProxyType(numbered(p)), lambda v: [*v.values()]),
}
OBJECTS = {
    "namespace": Kind(lambda p: SimpleNamespace(value=p), lambda v: list(v.value)),
    "slots": Kind(in_slots, lambda v: list(v.value)),
}
"""Of classes that nobody knows: as results they are themselves, with what they hold."""
KINDS = COPIED | REFUSED | OBJECTS
COMPUTED = ("new", "view", "leaf", "stored")
VIEWED = ("view of given", "view of weight", "view of buffer")
ITSELF = ("given", "taken", "weight", "buffer", "other's buffer", "container", "wide", "number")
LEAVES = [*COMPUTED, *COMPUTED, *VIEWED, *ITSELF]


@dataclass(eq=False)
class Plan:
    """What to return: a leaf of a kind, or a container of a kind with parts. One plan may stand in several places."""

    kind: str
    parts: tuple["Plan", ...] = ()
    index: int = 0

    @property
    def changes(self) -> bool:
        return self.kind in COMPUTED or (self.kind in COPIED and any(part.changes for part in self.parts))

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(str, self.parts))})" if self.parts else self.kind


def draw(leaves: list[str], kinds: list[str], depth: int, made: list[Plan]) -> Plan:
    if made and random.random() < 0.15:
        return random.choice(made)
    if depth == 0 or random.random() < 0.2:
        plan = Plan(random.choice(leaves), index=random.randrange(100))
    else:
        parts = tuple(draw(leaves, kinds, depth - 1, made) for _ in range(random.randint(1, 3)))
        plan = Plan(random.choice(kinds), parts)
    made.append(plan)
    return plan


def build(plan: Plan, leaf: Callable[[Plan], Any], made: dict[Plan, Any]) -> Any:
    """Make what is planned; a plan that stands twice gives one object."""
    if plan not in made:
        parts = [build(part, leaf, made) for part in plan.parts]
        made[plan] = KINDS[plan.kind].make(parts) if parts else leaf(plan)
    return made[plan]


class Drawn(nn.Module):
    """Computes something, and returns what a plan says of it and of all else that there is."""

    def __init__(self, plan: Plan, holds: bool) -> None:
        super().__init__()
        self.plan, self.holds, self.given = plan, holds, dict[Plan, Any]()
        self.linear, self.inner = nn.Linear(8, 8), Own()
        self.weight = nn.Parameter(low())
        self.stored: list[Any] = []

    def forward(self, x: Tensor, _: Any, other: Own, taken: list[Tensor]) -> Any:
        return self.pack(self.linear(x), other, taken)

    @torch.compiler.disable
    def pack(self, h: Tensor, other: Own, taken: list[Tensor]) -> Any:
        tensors = [value for value in self.given.values() if isinstance(value, Tensor)]
        self.containers = [value for value in self.given.values() if not isinstance(value, Tensor)]
        self.seen = dict[Plan, Any]()
        choose: dict[str, Callable[[int], Any]] = {
            "new": lambda i: h * i,
            "view": lambda i: (h + i)[0],
            "leaf": lambda i: (h - i).detach().requires_grad_(),
            "stored": lambda i: (self.stored.append(h / i), self.stored[-1])[1],
            "given": lambda i: tensors[i % len(tensors)],
            "taken": lambda _: taken.pop() if taken else None,
            "weight": lambda _: self.weight,
            "buffer": lambda _: self.inner.kept,
            "other's buffer": lambda _: other.kept,
            "container": lambda i: self.containers[i % len(self.containers)],
            "view of given": lambda i: tensors[i % len(tensors)][0],
            "view of weight": lambda _: self.weight.detach(),
            "view of buffer": lambda _: self.inner.kept.t(),
            "wide": lambda i: h.float() + i,
            "number": lambda i: i,
        }

        def leaf(plan: Plan) -> Any:
            made = choose[plan.kind](plan.index)
            is_tensor = isinstance(made, Tensor)
            assert not is_tensor or plan.kind == "wide" or made.dtype == LOW
            # A reference would make a difference: what only the result holds was computed.
            self.seen[plan] = (weakref.ref(made), made.detach().clone()) if is_tensor else (lambda: made, None)
            return made

        result = build(self.plan, leaf, made := {})
        for container in self.containers:
            if type(container) is list:
                container.append(h)
        self.built = made if self.holds else {}
        return result


def check(model: Drawn, plan: Plan, found: Any, before: dict[Plan, Any]) -> None:
    """Raise AssertionError where the rule doesn't hold."""
    if plan in before:
        assert before[plan] is found, f"another for the second {plan}"
        return
    before[plan] = found
    if plan.parts:
        kind, built = KINDS[plan.kind], model.built.get(plan)
        assert built is None or (found is built) is (not plan.changes), f"itself, or a copy: {plan}"
        assert built is None or type(found) is type(built)
        inner = kind.parts(found)
        assert len(inner) == len(plan.parts), f"the parts of {plan}"
        if built is not None:  # nothing of the program's own changes
            assert all(a is model.built[b] for a, b in zip(kind.parts(built), plan.parts, strict=True))
        for part, value in zip(plan.parts, inner, strict=True):
            if part.changes and plan.kind not in COPIED:
                assert plan.kind in REFUSED | OBJECTS and value is not None
            else:
                check(model, part, value, before)
        return
    reference, numbers = model.seen[plan]
    if plan.kind in COMPUTED:
        assert found.dtype == HIGH and torch.equal(found, numbers.float()), f"{found.dtype} of {plan}"
    elif plan.kind in VIEWED:
        assert found.dtype == LOW and torch.equal(found, numbers), f"{found.dtype} of {plan}"
    else:
        assert found is reference() and (numbers is None or torch.equal(found, numbers)), f"another {plan}"


def low() -> Tensor:
    return torch.randn(2, 8, dtype=LOW)


@pytest.mark.parametrize("part", range(4))
def test_results_leave_as_the_rule_says(part: int) -> None:
    for _ in range(12):
        torch._dynamo.reset()
        plan = draw(LEAVES, [*COPIED, *COPIED, *REFUSED, *OBJECTS], 3, [])
        arguments = Plan(random.choice([*KINDS]), tuple(draw(["low"], [*KINDS], 2, []) for _ in range(2)))
        model, other = Drawn(plan, holds=random.random() < 0.5), Own()
        run = torch.compile(model, backend="amp", options={"lower": "aot_eager"})
        mode = random.choice([torch.enable_grad, torch.no_grad, torch.inference_mode])
        with mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore", AmpWarning)
            for _ in range(3):
                model.given.clear()
                given = build(arguments, lambda _: low(), model.given)
                found = run(torch.randn(2, 8), given, other, [low(), low()])
                check(model, plan, found, {})
                held = [*model.stored, *(c[-1] for c in model.containers if type(c) is list)]
                assert all(tensor.dtype == LOW for tensor in held), "what stays inside"
