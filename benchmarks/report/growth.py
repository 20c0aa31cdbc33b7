"""How times grow with the size of things, from the rows of the growth stage: in words and in pictures."""

import re
from collections.abc import Callable
from math import log
from pathlib import Path
from statistics import linear_regression

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from benchmarks.peers import AMP, LIMIT
from benchmarks.records import Records, Row, spread
from benchmarks.report.ink import looks, picture

Cases = dict[str, dict[str, Row]]
Points = dict[str, list[tuple[float, float]]]
"""Peer → (size, seconds), by size."""


def by_parameters(cases: Cases) -> Points:
    """A call on 16 tokens, against the number of parameters."""
    return _points(cases, r"GPT (\d+)x(\d+)", lambda row, _: row.figures["parameters"])


def by_weights(cases: Cases) -> Points:
    """The extra time of a call on many small weights over the converted model's, against their number."""
    points = _points(cases, r"(\d+) weights", lambda _, match: float(match[1]))
    least = dict(points.pop(LIMIT, []))
    return {peer: [(size, s - least[size]) for size, s in line if size in least] for peer, line in points.items()}


def by_nodes(cases: Cases) -> Points:
    """Our passes, against the nodes of the graph."""
    return _points(cases, r"\d+ nodes", lambda row, _: row.figures["nodes"])


def _points(cases: Cases, pattern: str, size: Callable[[Row, re.Match], float]) -> Points:
    found: Points = {}
    for case, rows in cases.items():
        for peer, row in rows.items():
            if (match := re.search(pattern, case)) and not row.why:
                found.setdefault(peer, []).append((size(row, match), spread(row.figures["seconds"]).middle))
    return {peer: sorted(points) for peer, points in found.items()}


def facts(cases: Cases) -> str:
    """The slopes in words."""
    lines = []
    for peer, line in by_weights(cases).items():
        if len(line) > 1:
            each, fixed = (1e6 * value for value in linear_regression(*zip(*line, strict=True)))
            lines.append(
                f"- A call of {peer} takes {fixed:.0f} µs and {each:.2f} µs a weight longer than one of {LIMIT}."
            )
    nodes = by_nodes(cases).get(AMP, [])
    if len(nodes) > 1:
        size, seconds = nodes[-1]
        power = linear_regression(*zip(*((log(size), log(seconds)) for size, seconds in nodes), strict=True)).slope
        lines.append(
            f"- Our passes take {seconds:.2f} s on {size:.0f} nodes, and grow as nodes to the power of {power:.2f}."
        )
    return "\n".join(lines) + "\n"


def draw_growth(records: Records, stage: str, path: Path) -> bool:
    """Time against parameters, overhead of a call against weights, time of the passes against nodes."""
    cases = records.cases(stage)
    with picture(path, 3, 13, 4) as (_, (parameters, weights, nodes)):
        _lines(parameters, by_parameters(cases), 1e3)
        parameters.set(title="a call on 16 tokens", xlabel="parameters", ylabel="ms", yscale="log")
        _lines(weights, by_weights(cases), 1e6)
        weights.set(title=f"a call, less one of {LIMIT}", xlabel="weights of 16 x 16", ylabel="µs")
        _lines(nodes, by_nodes(cases), 1)
        nodes.set(title="our passes", xlabel="nodes in the graph", ylabel="s", yscale="log")
    return True


def _lines(axes: Axes, points: Points, unit: float) -> None:
    for peer, line in points.items():
        sizes, seconds = zip(*line, strict=True)
        axes.plot(sizes, [unit * value for value in seconds], label=peer, **looks(peer))
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())  # they would overlap
    if set(points) - {AMP}:
        axes.legend()
