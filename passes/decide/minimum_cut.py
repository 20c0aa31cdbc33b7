"""The minimum s-t cut of a directed graph: what must lie on one side is put there first, and a flow cuts the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any

import networkx  # type: ignore[import-untyped]  # torch itself depends on it

Capacities = Mapping[tuple[Hashable, Hashable], float]


def source_side(capacities: Capacities, source: Hashable, sink: Hashable) -> set[Any]:
    """The vertices on the source's side of a minimum cut; `capacities`: of each edge, infinity where it may not be cut.

    A vertex can stay with the source, whatever the others do, if its edge from the source holds at least as much as
    all its outgoing edges together; likewise for the sink. Where casts are placed that settles nearly all of them,
    in linear time.
    """
    ways_out: dict[Hashable, dict[Hashable, float]] = defaultdict(dict)
    ways_in: dict[Hashable, dict[Hashable, float]] = defaultdict(dict)
    for (a, b), capacity in capacities.items():
        if a != sink and b != source and capacity:
            ways_out[a][b] = ways_in[b][a] = capacity
    settled: dict[Hashable, Hashable] = {source: source, sink: sink}
    pending = list(dict.fromkeys((*ways_out, *ways_in)))
    while pending:
        vertex = pending.pop()
        if vertex in settled:
            continue
        after, before = ways_out[vertex], ways_in[vertex]
        if before.get(source, 0) >= sum(after.values()):
            side = source
        elif after.get(sink, 0) >= sum(before.values()):
            side = sink
        else:
            continue
        settled[vertex] = side
        _merge(vertex, side, source, sink, ways_out, ways_in)
        pending += [other for other in (*after, *before) if other not in settled]
    found = {vertex for vertex, side in settled.items() if side == source}
    return found | _cut_by_flow(ways_out, settled, source, sink)


def _merge(vertex: Any, side: Any, source: Any, sink: Any, ways_out: Any, ways_in: Any) -> None:
    """Hand a vertex's edges over to the terminal it stays with; what can't be cut any more is dropped."""
    for other, capacity in ways_out[vertex].items():
        ways_in[other].pop(vertex)
        if side == source and other != sink:
            ways_out[source][other] = ways_in[other][source] = ways_in[other].get(source, 0) + capacity
    for other, capacity in ways_in[vertex].items():
        ways_out[other].pop(vertex)
        if side == sink and other != source:
            ways_in[sink][other] = ways_out[other][sink] = ways_out[other].get(sink, 0) + capacity


def _cut_by_flow(ways_out: Any, settled: Any, source: Any, sink: Any) -> set[Any]:
    flow = networkx.DiGraph()
    flow.add_nodes_from((source, sink))
    for a, edges in ways_out.items():
        for b, capacity in edges.items():
            if (a == source or a not in settled) and (b == sink or b not in settled):
                flow.add_edge(a, b, capacity=capacity)
    if flow.number_of_nodes() == 2:
        return {source}
    # Of networkx's searches the only one that stayed near linear time on long chains of residual blocks.
    search = networkx.algorithms.flow.preflow_push
    _, (reached, _) = networkx.minimum_cut(flow, source, sink, flow_func=search)
    return set(reached)
