"""How pictures look: transparent, in colours that stand out on white and on black alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.peers import AMP, BASELINE, LIMIT

TEXT, GRID = "#7c848f", "#7c848f50"
COLOURS = {
    AMP: "#e5484d",
    BASELINE: "#4c8bf5",
    LIMIT: "#2a9d6f",
    "eager fp32": "#8d7b5a",
    "eager autocast": "#d98324",
    "Inductor fp32": "#9a6fd0",
    "Thunder + autocast": "#c2689b",
    "Inductor": "#4c8bf5",
    "torch": "#1fa2b8",
    "Liger-Kernel": "#c2689b",
}
MARKERS = {"relaxed": "P", "max-autotune": "^", "reduce-overhead": "s", "freezing": "D", "by block": "v"}
STYLE: Any = {
    "font.size": 10,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": TEXT,
    "axes.titlesize": 11,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.transparent": True,
    "svg.hashsalt": "ampcompile",  # the same data gives the same file
    "svg.fonttype": "none",  # letters drawn as curves are most of a file
}


def family(peer: str) -> str:
    """The peer without its mode or option, or without what it does."""
    whole, _, mode = peer.rpartition(", ")
    return whole if mode in MARKERS or mode.startswith("fuse=") else peer.partition(":")[0]


def looks(peer: str) -> dict[str, Any]:
    """Colour and marker of a peer: ours is red, a peer's other modes are hollow."""
    mode = peer.rpartition(", ")[2]
    colour = COLOURS[family(peer)]
    return {
        "color": colour,
        "marker": MARKERS.get(mode, "o"),
        "markerfacecolor": "none" if mode in MARKERS else colour,
    }


@contextmanager
def picture(path: Path, panels: int, width: float, height: float) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure, with axes side by side, that is written to `path` in the end."""
    with matplotlib.rc_context(STYLE):
        figure: Figure = pyplot.figure(figsize=(width, height), layout="constrained")
        axes = [figure.add_subplot(1, panels, panel + 1) for panel in range(panels)]
        for one in axes:
            one.grid(True, linewidth=0.6)
            one.set_axisbelow(True)
        yield figure, axes
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
