"""What drawn arguments hold isn't walked through in each call, counted in lines; what calls put there isn't input."""

import random
import sys
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.compiling import HIGH, LOW, dtypes

LINEAR = nn.utils.skip_init(nn.Linear, 8, 8)
Named = namedtuple("Named", "x parts")


@dataclass
class Record:
    x: Any
    parts: Any


HOLDERS: list[Callable[[Any, Any], Any]] = [
    Record,
    Named,
    lambda x, parts: SimpleNamespace(x=x, parts=parts),
    lambda x, parts: SimpleNamespace(x=x, parts=SimpleNamespace(inner=parts)),
    lambda x, parts: SimpleNamespace(x=x, parts=(each for each in parts)),
]
PARTS: list[Callable[[int], Any]] = [
    lambda n: [object() for _ in range(n)],
    lambda n: tuple({"a": i, "b": [str(i)]} for i in range(n)),
    lambda n: {i: (i, object()) for i in range(n)},
    lambda n: [Record(i, None) for i in range(n)],
    lambda n: {object() for _ in range(n)},
    lambda n: deque(SimpleNamespace(i=i) for i in range(n)),
    lambda n: [[[i, object()]] for i in range(n)],
]
RESULTS: list[Callable[[Any, Any], Any]] = [
    lambda h, batch: h,
    lambda h, batch: (h, [h * 2, {"a": h + 1}]),
    lambda h, batch: {"a": Record(h, None), "b": OrderedDict(c=h)},
    lambda h, batch: (h, batch, "text", (1, 2)),
    lambda h, batch: h.chunk(2),
    lambda h, batch: (h, batch.x),
    lambda h, batch: Named(h, deque([h, None])),
]


@pytest.fixture(autouse=True)
def drawn() -> None:
    """Numbers of the test's own seed."""
    LINEAR.reset_parameters()


def lines_of(f: Callable[[], Any]) -> int:
    """How many lines of ampcompile's Python run in a call."""
    lines = 0

    def count(_: Any, event: str, __: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    outer = sys.gettrace()
    sys.settrace(lambda frame, event, _: count if "ampcompile" in frame.f_globals.get("__name__", "") else None)
    try:
        f()
    finally:
        sys.settrace(outer)
    return lines


@pytest.mark.parametrize("part", range(4))
def test_a_call_takes_no_longer_with_more_in_its_arguments(part: int) -> None:
    for _ in range(4):
        torch._dynamo.reset()
        hold, make, give, direct = (*map(random.choice, (HOLDERS, PARTS, RESULTS)), random.random() < 0.3)
        run = torch.compile(
            lambda batch, _, give=give: give(LINEAR(batch.x), batch), backend="amp", options={"lower": "aot_eager"}
        )
        lines = []
        with torch.set_grad_enabled(random.random() < 0.5):
            for n in (200, 2000):
                call = (hold(torch.randn(2, 8), make(n)), [*make(n)] if direct else None)
                for _ in range(3):
                    run(*call)
                lines.append(lines_of(lambda run=run, call=call: run(*call)))
        assert lines[0] == lines[1], "lines with 200 and with 2000 parts"


def test_what_came_in_is_found_without_a_look_at_all() -> None:
    batch = SimpleNamespace(x=torch.randn(2, 8), low=torch.ones(2, 8, dtype=LOW), parts=[])
    batch.lows = [batch.low]
    run = torch.compile(
        lambda b: (LINEAR(b.x), b.low, b.lows, b.low[0], b.parts), backend="amp", options={"lower": "aot_eager"}
    )
    lines = []
    for n in (200, 2000):
        batch.parts = [object() for _ in range(n)]
        for _ in range(3):
            h, same, lows, view, parts = run(batch)
            assert dtypes([h, view]) == [HIGH, LOW]
            assert same is batch.low and lows is batch.lows and parts is batch.parts and lows[0] is same
            assert view.untyped_storage().data_ptr() == same.untyped_storage().data_ptr()
        lines.append(lines_of(lambda: run(batch)))
    assert lines[0] == lines[1]


@pytest.mark.parametrize("breaks", [False, True])
def test_what_a_call_puts_into_its_arguments_leaves_in_float32(breaks: bool) -> None:
    def f(x, cache, keeps=True):
        k = LINEAR(x)
        if breaks:
            torch._dynamo.graph_break()
            k = k * 2
        if keeps:
            cache.keys.append(k)
            cache.last["k"] = [k]
            return k, cache.last["k"], cache.keys, cache
        return k, k, cache.keys, cache

    for first in (True, False):
        torch._dynamo.reset()
        run = torch.compile(f, backend="amp", options={"lower": "aot_eager"})
        cache = SimpleNamespace(keys=[], last={})
        for i in range(4):
            k, last, keys, same = run(torch.randn(2, 8), cache, first or i > 0)
            assert same is cache and keys is cache.keys, "containers that came in stay the same objects"
            assert k.dtype == HIGH and all(each.dtype == LOW for each in keys)
            if first or i > 0:
                assert last is not cache.last["k"] and dtypes([last[0], cache.last["k"][0]]) == [HIGH, LOW]
