"""How times grow with the size of things, from the rows of the growth stage."""

import re
from collections.abc import Callable
from math import log
from statistics import linear_regression

from benchmarks.peers import AMP, LIMIT
from benchmarks.records import Row, spread

Cases = dict[str, dict[str, Row]]
Points = dict[str, list[tuple[float, float]]]
"""Peer → (size, seconds), by size."""


def by_parameters(cases: Cases) -> Points:
    """A call on 16 tokens, against the number of parameters."""
    return _points(cases, r"GPT (\d+)x(\d+)", lambda row, _: row.figures["parameters"])


def by_weights(cases: Cases) -> Points:
    """What a call on many small weights takes longer than the converted model's, against their number."""
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
