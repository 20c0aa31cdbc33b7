"""The first number out of the range of its type in a real run, and how near others come, read when asked for."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from glob import escape
from operator import itemgetter
from typing import Any

import torch

from ampcompile.compiler.ambient import options_of
from ampcompile.compiler.watched_graph import WatchedGraph, graphs, limit
from ampcompile.dtypes import NAMES
from ampcompile.errors import OptionError
from ampcompile.passes.after.record_magnitudes import WatchedValue
from ampcompile.policy import Policy
from ampcompile.torch_private import compilations, marks

from .show import table, text_of

NEAREST = 10  # most rows of the table


@dataclass(frozen=True)
class Magnitude:
    """The magnitude of one value in one call."""

    value: WatchedValue
    call: int
    """The number of the call of its graph, in its direction, from 1 on."""
    largest: float
    """The largest magnitude; of a cast, of the numbers that it reads."""
    calls_out_of_range: int
    """The number of calls so far in which a number was infinite or NaN, or became so."""

    @property
    def share(self) -> float:
        """The part of its type's range that it takes: above 1, a number is out of range."""
        return self.largest / torch.finfo(NAMES.get(self.value.dtype, torch.float32)).max


@dataclass(frozen=True)
class OutOfRange:
    """The first number out of range: in which value, and what was known of it before."""

    at: Magnitude
    before: float | None
    """The magnitude in the call before; None in the first call."""

    def __str__(self) -> str:
        value = self.at.value
        op = f"{value.op} {'to' if value.kind == 'cast' else 'in'} {value.dtype}"
        lines = [f"first number out of range: call {self.at.call}, {_direction(value)}, {_where(value)}: {op}"]
        if self.before is not None:
            lines.append(f"largest magnitude in the call before: {self.before:.6g}")
        return "\n".join(lines)


@dataclass(frozen=True)
class WatchReport:
    """The magnitudes that a watch has kept. `str(report)` names the first out of range, and those nearest to it."""

    first: OutOfRange | None
    last: Sequence[Magnitude]
    """All watched values in the last call of each graph."""
    first_in_forward: OutOfRange | None = None
    """As `first`, for forwards alone. In backward a loss scale that is too large is enough, as most are at first; its
    scaler then skips the step."""

    def __str__(self) -> str:
        if not self.last:
            return "no watched value yet: call what was compiled, then ask for a report"
        rows = [
            (v.module, v.source, v.op, v.dtype, _direction(v), f"{size:.4g}", f"{share:.2g}")
            for share, size, v in sorted(((m.share, m.largest, m.value) for m in self.last), key=lambda row: -row[0])
        ]
        headings = ("module", "line", "op", "dtype", "in"), ("largest magnitude", "of its range")
        heads = [str(self.first) if self.first is not None else "no number left the range of its type"]
        if self.first is not None and self.first.at.value.backward:
            heads.append(f"in forward: {self.first_in_forward or 'none; in backward a large loss scale may be why'}")
        if self.first_in_forward is not None:
            heads.append(f"next: {_remedy(self.first_in_forward.at.value)}")
        caption = "nearest to the end of their range in the last call"
        return text_of([*heads, "", caption, table(*headings, rows[:NEAREST])])


@dataclass(frozen=True)
class Watch:
    """The watch over a compiled callable: nothing is read from the device before `report` is called."""

    f: Any

    @marks.run_untraced
    def report(self) -> WatchReport:
        """Read the magnitudes; waits for the device."""
        mine = [graph for graph in graphs if graph.belongs_to(self.f)]
        firsts = [first for graph in mine for first in _first(graph)]
        forward = [(time, out) for time, out in firsts if not out.at.value.backward]
        first, first_in_forward = (min(outs, key=itemgetter(0), default=(0, None))[1] for outs in (firsts, forward))
        last = [magnitude for graph in mine for magnitude in _last(graph)]
        return WatchReport(first, last, first_in_forward)


@marks.run_untraced
def watch(compiled: Callable[..., Any]) -> Watch:
    """Return the watch over a callable that was compiled with `options={"watch": True}`.

    Its graphs compute the largest magnitude of each product and each cast to a 16-bit type, and of other ops that may
    make infinite numbers of finite ones, and keep them on the device: no call waits for it. The first call with a
    number out of range is kept. Results and their bits don't change. Raises OptionError if the callable isn't watched.

    >>> compiled = torch.compile(model, backend="amp", options={"dtype": torch.float16, "watch": True})
    >>> loss = compiled(x).square().mean()
    >>> print(ampcompile.watch(compiled).report().first)
    None
    """
    how = compilations.how_compiled(compiled)
    options = None if how is None else options_of(how.backend)
    if how is None or options is None or not options.watch:
        raise OptionError(
            f"ampcompile.watch found {type(compiled).__name__!r}, expected a callable that is compiled and watched: "
            'torch.compile(model, backend="amp", options={"watch": True}).'
        )
    return Watch(how.original)


def _where(value: WatchedValue) -> str:
    return " ".join(filter(None, (value.module or "outside of modules", value.source)))


def _remedy(value: WatchedValue) -> str:
    if value.dtype != "f16":
        return "float32 has no wider range: mend the model, or its inputs"
    if not value.module:
        return 'options={"dtype": torch.bfloat16}, whose range is float32\'s'
    policy = str(Policy(modules=((escape(value.module), "fp32"),)))
    return f'options={{"policy": {json.dumps(policy, ensure_ascii=False)}}} keeps that module in float32'


def _direction(value: WatchedValue) -> str:
    return "backward" if value.backward else "forward"


def _first(graph: WatchedGraph) -> Iterator[tuple[int, OutOfRange]]:
    for backward, kept in graph.kept.items():
        if (first := kept.first()) is None:
            continue
        (time, call, row), before = first
        values, magnitudes = graph.values_in(backward), row.tolist()
        out = [i for i, value in enumerate(values) if not magnitudes[i] <= limit(value)]
        i = next((i for i in out if not any(operand in out for operand in values[i].operands)), out[0])
        at = Magnitude(values[i], call, magnitudes[i], int(kept.counts[i]))
        yield time, OutOfRange(at, float(before[i]) if call > 1 else None)


def _last(graph: WatchedGraph) -> Iterator[Magnitude]:
    for backward, kept in graph.kept.items():
        if (row := kept.last()) is not None:
            values = graph.values_in(backward)
            for value, largest, count in zip(values, row.magnitudes.tolist(), kept.counts.tolist(), strict=False):
                yield Magnitude(value, row.call, largest, int(count))
