"""Counts of many equal layers from those of few: each further layer adds what the last one added."""

from collections.abc import Callable, Mapping
from typing import Any

_COUNTS = ("launches", "bytes", "flops", "saved", "peak", "roundings")


def at_depth(counted: Mapping[int, dict[str, Any]], layers: int) -> dict[str, Any]:
    """The answer for a model of `layers` from those for two depths; the kernels' resources are the deeper model's."""
    (few, less), (more, last) = sorted(counted.items())

    def line(start: int, end: int) -> int:
        return start + (end - start) * (layers - few) // (more - few)

    graphs = [_graph(*pair, line) for pair in zip(less["graphs"], last["graphs"], strict=True)]
    return {"parameters": line(less["parameters"], last["parameters"]), "graphs": graphs}


def repeated(block: dict[str, Any], times: int) -> dict[str, Any]:
    """The answer for `times` equal blocks, each compiled alone: while one runs, what the others save is alive."""
    saved = sum(graph["saved"] for graph in block["graphs"])
    none = [
        graph | dict.fromkeys(_COUNTS, 0) | {"calls": {}, "parts": [], "peak": graph["peak"] - saved}
        for graph in block["graphs"]
    ]
    return at_depth({0: {"parameters": 0, "graphs": none}, 1: block}, times)


def _graph(few: dict[str, Any], more: dict[str, Any], line: Callable[[int, int], int]) -> dict[str, Any]:
    counts = {what: line(few[what], more[what]) for what in _COUNTS}
    calls = {name: line(few["calls"].get(name, 0), more["calls"].get(name, 0)) for name in few["calls"] | more["calls"]}
    before, after = ({label: part for label, *part in graph["parts"]} for graph in (few, more))
    parts = [[label, *map(line, before.get(label, (0, 0)), after.get(label, (0, 0)))] for label in before | after]
    return more | counts | {"calls": calls, "parts": sorted(parts, key=lambda part: -part[-1])}
