"""The public name, and the report: which number first left the range of its type, and how near others come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampcompile.compiler.ambient import options_of
from ampcompile.dtypes import LOW_NAMES
from ampcompile.errors import OptionError
from ampcompile.explaining.text import render_table
from ampcompile.passes.after.record_magnitudes import WatchedValue
from ampcompile.torch_private import dynamo_caches

from .watched_graph import WatchedGraph, graphs

_NEAREST = 10


@dataclass(frozen=True)
class Magnitude:
    """The statistics of one value in one call."""

    value: WatchedValue
    call: int
    """The number of the call of its graph, in its direction, from 1 on."""
    largest: float
    """The largest finite magnitude; of a cast, of the numbers that it reads."""
    made: int
    """Numbers that are infinite or NaN and come of finite ones."""
    present: int
    """Numbers that are infinite or NaN."""

    @property
    def share(self) -> float:
        """The part of its type's range that it takes: from 1 on, a cast overflows."""
        return self.largest / torch.finfo(_dtype(self.value)).max


@dataclass(frozen=True)
class OutOfRange:
    """The first number out of range: in which value, and what was known of it before."""

    at: Magnitude
    before: float | None
    """The largest finite magnitude in the call before; None in the first call."""
    bound: float | None
    """No exact result can be larger: of a cast, what it reads; of a product, by its operands; None if unknown."""

    def __str__(self) -> str:
        value, bound = self.at.value, self.bound
        where = " ".join(filter(None, (value.module or "outside of modules", value.source)))
        direction = "backward" if value.backward else "forward"
        text = (
            f"{where}: {value.op} to {value.dtype}" if value.kind == "cast" else f"{where}: {value.op} in {value.dtype}"
        )
        lines = [f"first number out of range: call {self.at.call}, {direction}, {text}: {self.at.made} numbers"]
        if self.before is not None:
            lines.append(f"largest magnitude in the call before: {self.before:.6g}")
        held = [name for name in ("bfloat16", "float32") if bound is not None and bound <= _largest(name)]
        if bound is None:
            lines.append("no bound is known, as not all of its operands are watched")
        elif held:
            lines.append(f"no exact number there is above {bound:.6g}: {' and '.join(held)} would have held it")
        else:
            lines.append(f"exact numbers there may reach {bound:.6g}, which float32 doesn't hold either")
        return "\n".join(lines)


@dataclass(frozen=True)
class WatchReport:
    """What `Watch.report` found. `str(report)` names the first number out of range and the values nearest to it."""

    first: OutOfRange | None
    last: Sequence[Magnitude]
    """All watched values in the last call of each graph."""

    def __str__(self) -> str:
        head = str(self.first) if self.first is not None else "no number left the range of its type"
        nearest = sorted(self.last, key=lambda each: -each.share)[:_NEAREST]
        rows = [
            (
                each.value.module,
                each.value.source,
                each.value.op,
                each.value.dtype,
                "backward" if each.value.backward else "forward",
                f"{each.largest:.4g}",
                f"{each.share:.2g}",
            )
            for each in nearest
        ]
        table = render_table(("module", "line", "op", "dtype", "in", "largest magnitude", "of its range"), rows)
        return f"{head}\n\nnearest to the end of their range in the last call\n{table}"


@dataclass(frozen=True)
class Watch:
    """The watch over a compiled callable: nothing is read from the device before `report` is called."""

    f: Any

    def report(self) -> WatchReport:
        """Read the statistics; waits for the device."""
        mine = [graph for graph in graphs if graph.belongs_to(self.f)]
        firsts = [found for graph in mine for found in _first(graph)]
        _, first = min(firsts, key=lambda each: each[0]) if firsts else (0, None)
        return WatchReport(first, [each for graph in mine for each in _last(graph)])


def watch(compiled: Callable[..., Any]) -> Watch:
    """Return the watch over a callable that was compiled with `options={"watch": True}`.

    Its graphs count, in each call, the infinite and NaN numbers of products, casts and other ops that may make them,
    and their largest magnitudes, and keep them on the device: no call waits for it. The first number out of range is
    kept until `report` is called, and after. Results and their bits don't change. Raises OptionError if the callable
    isn't watched.

    >>> compiled = torch.compile(model, backend="amp", options={"dtype": torch.float16, "watch": True})
    >>> loss = compiled(x).square().mean()
    >>> print(ampcompile.watch(compiled).report().first)
    None
    """
    how = dynamo_caches.how_compiled(compiled)
    options = None if how is None else options_of(how.backend)
    if how is None or options is None or not options.watch:
        raise OptionError(
            "ampcompile.watch expects a callable that is compiled and watched: "
            'torch.compile(model, backend="amp", options={"watch": True}).'
        )
    return Watch(how.original)


def _first(graph: WatchedGraph) -> Iterator[tuple[int, OutOfRange]]:
    for backward, ring in graph.rings.items():
        if (found := ring.first()) is None:
            continue
        row, before = found
        values = [value for value in graph.values if value.backward == backward]
        largest, made, present = row.statistics.tolist()
        out = [i for i in range(len(values)) if made[i]]
        own = [i for i in out if not any(present[operand] for operand in values[i].operands)]
        i = (own or out)[0]
        at = Magnitude(values[i], row.call, largest[i], int(made[i]), int(present[i]))
        former = float(before[0, i]) if row.call > 1 else None
        yield row.time, OutOfRange(at, former, _bound(values[i], largest[i], largest))


def _last(graph: WatchedGraph) -> Iterator[Magnitude]:
    for backward, ring in graph.rings.items():
        values = [value for value in graph.values if value.backward == backward]
        if (row := ring.last()) is not None:
            columns = zip(values, *row.statistics[:, : len(values)].tolist(), strict=True)
            for value, largest, made, present in columns:
                yield Magnitude(value, row.call, largest, int(made), int(present))


def _bound(value: WatchedValue, largest: float, magnitudes: Sequence[float]) -> float | None:
    if value.kind == "cast":
        return largest
    if value.length:
        first, second = (magnitudes[i] for i in value.operands)
        return value.length * first * second
    return None


def _dtype(value: WatchedValue) -> torch.dtype:
    return {"f16": torch.float16, "bf16": torch.bfloat16}.get(value.dtype, torch.float32)


def _largest(name: str) -> float:
    return torch.finfo(LOW_NAMES.get(name, torch.float32)).max
