"""python -m benchmarks.picture [RESULTS.json]   writes docs/pictures/speed.svg: speeds beside Inductor's."""

import sys
from pathlib import Path
from statistics import quantiles
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.machine import ROOT
from benchmarks.peers import AMP, BASELINE
from benchmarks.plans import ON_CPU
from benchmarks.race import name_stage
from benchmarks.records import RESULTS, Records

PICTURE = ROOT / "docs" / "pictures" / "speed.svg"
COLOURS = {"eager autocast": "#d98324", BASELINE: "#4c8bf5", AMP: "#e5484d"}
TEXT = "#7c848f"
STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), TEXT),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "grid.color": f"{TEXT}50",
    "savefig.transparent": True,
    "svg.hashsalt": "ampcompile",  # the same data gives the same file
    "svg.fonttype": "none",  # letters drawn as curves are most of a file
}


def find_ratios(records: Records) -> dict[str, dict[str, list[float]]]:
    """Case → peer → quartiles of the times as fast, of the ratios within rounds."""
    found = {}
    for stage in [name_stage(work, kind) for work in ON_CPU for kind in work.kinds]:
        peers = records.stages.get(stage, {})
        if peers.keys() >= COLOURS.keys():
            base = peers[BASELINE]["seconds"]
            rounds = {n: [b / s for b, s in zip(base, peers[n]["seconds"], strict=True)] for n in COLOURS}
            found[stage.removesuffix(": call")] = {n: quantiles(r, method="inclusive") for n, r in rounds.items()}
    return found


def draw(records: Records, path: Path) -> None:
    """One line for each case, a mark for each peer, medians at the right."""
    cases = find_ratios(records)
    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(9, 1.8 + 0.3 * len(cases)), layout="constrained")
        cpu = "{processor}, {cores} cores".format_map(records.about)
        title = f"Speed in bfloat16 on {cpu}: the further right, the faster\n1x16: one sequence of 16 tokens; 1x224: "
        axes.set_title(f"{title}one image of 224 x 224; step: a training step", loc="left", size=10)
        for place, found in enumerate(cases.values()):
            for line, (peer, (low, middle, high)) in enumerate(found.items()):
                spread, label = [[middle - low], [high - middle]], peer if place == 0 else None
                axes.errorbar(middle, place, xerr=spread, fmt="o", color=COLOURS[peer], label=label)
                if peer != BASELINE:
                    at: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
                    axes.annotate(f"{middle:.2f}x", (1, place), (12 + 20 * line, 0), color=COLOURS[peer], **at)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks := [0.25, 0.5, 1, 2, 4], [f"{tick:g}x" for tick in ticks])
        axes.set_yticks(range(len(cases)), list(cases))
        axes.invert_yaxis()
        axes.grid(True, axis="x")
        axes.set_xlabel(f"times as fast as {BASELINE}: median and quartiles")
        figure.legend(loc="outside lower center", ncols=3)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    draw(Records.load(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "cpu-amd-epyc.json"), PICTURE)
