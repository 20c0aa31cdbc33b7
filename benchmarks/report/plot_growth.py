"""Pictures of how times grow with the size of things."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from benchmarks.peers import AMP, LIMIT
from benchmarks.records import Records
from benchmarks.report.growth import Points, by_nodes, by_parameters, by_weights
from benchmarks.report.ink import looks, picture


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
