"""Pictures of result files: speed by stage, growth, roofline, beside the file; and one of all for the README."""

from pathlib import Path
from typing import Any

from benchmarks.peers import AMP, BASELINE, PEERS
from benchmarks.records import Records, Spread, times_faster
from benchmarks.report.growth import draw_growth
from benchmarks.report.ink import TEXT, looks, picture
from benchmarks.report.roofline import draw_roofline
from benchmarks.report.targets import UNTIMED

UNRACED = (UNTIMED, "kernels", "scaler", "compiled-steps", "memory", "growth", "small", "compile", "import")
"""Stages with pictures of their own, or with a table only."""
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "speed.svg"
SHOWN = ("eager autocast", BASELINE, AMP)
STAGES = ("inference", "architectures", "training")
TITLE = """Speed in bfloat16 on {processor}, {cores} cores: the further right, the faster
1x16: one sequence of 16 tokens; 1x224: one image of 224 x 224; step: a training step"""


def draw(records: Records) -> dict[str, Path]:
    """Write every picture that the results allow; stage → file."""
    drawings = {stage: draw_speed for stage in records.stages if stage not in UNRACED}
    if "growth" in records.stages:
        drawings["growth"] = draw_growth
    if "kernels" in records.stages:
        drawings["kernels"] = draw_roofline
    files = {stage: records.path.with_name(f"{records.path.stem}-{stage}.svg") for stage in drawings}
    return {stage: file for stage, file in files.items() if drawings[stage](records, stage, file)}


def draw_speed(records: Records, stage: str, path: Path) -> bool:
    """Every peer's speed as a multiple of Inductor's under autocast, with quartiles; False if there is nothing."""
    return draw_ratios(ratios(records, stage), path)


def ratios(records: Records, stage: str) -> dict[str, dict[str, Spread]]:
    """Case → peer → times as fast as Inductor under autocast, where that ran."""
    return {
        case: {peer: times_faster(row, rows[BASELINE]) for peer, row in rows.items() if not row.why}
        for case, rows in records.cases(stage).items()
        if BASELINE in rows and not rows[BASELINE].why
    }


def draw_ratios(cases: dict[str, dict[str, Spread]], path: Path, inches: float = 0.14, title: str = "") -> bool:
    """The peers of a case so many inches below one another; in one line, with medians, for 0. False without a case."""
    if not cases:
        return False
    peers = [peer for peer in PEERS if any(peer in found for found in cases.values())]
    height = 1.5 + 0.25 * title.count("\n") + sum(0.3 + inches * len(found) for found in cases.values())
    with picture(path, 1, 9, height) as (figure, (axes,)):
        figure.suptitle(title, size="medium", x=0.01, ha="left", linespacing=1.5)
        for place, found in enumerate(cases.values()):
            for line, (peer, (low, middle, high)) in enumerate(found.items()):
                height = place + bool(inches) * 0.8 * ((line + 0.5) / len(found) - 0.5)
                label = peer if peer in peers else None
                peers = [name for name in peers if name != peer]
                whisker = [[middle - low], [high - middle]]
                axes.errorbar(middle, height, xerr=whisker, linestyle="none", label=label, **looks(peer))
                if not inches and peer != BASELINE:
                    at: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
                    offset, colour = (12 + 20 * line, 0), looks(peer)["color"]
                    axes.annotate(f"{middle:.2f}x", (1, height), offset, color=colour, **at)
        axes.axvline(1, color=TEXT, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks := [0.25, 0.5, 1, 2, 4], [f"{tick:g}x" for tick in ticks])
        axes.set_yticks(range(len(cases)), list(cases))
        axes.set_ylim(len(cases) - 0.5, -0.5)
        axes.grid(False, axis="y")
        axes.set_xlabel(f"times as fast as {BASELINE}: median and quartiles")
        figure.legend(loc="outside lower center", ncols=3)
    return True


def summary(files: list[Records]) -> dict[str, dict[str, Spread]]:
    """Case → peer → times as fast as Inductor under autocast: every model of the first CPU on which all `SHOWN` ran."""
    cpus = [records for records in files if records.about["device"] == "cpu"]
    same = [records for records in cpus if records.about["processor"] == cpus[0].about["processor"]]
    found = {case: peers for stage in STAGES for r in same for case, peers in ratios(r, stage).items()}
    return {case: {peer: peers[peer] for peer in SHOWN} for case, peers in found.items() if {*SHOWN} <= peers.keys()}


def draw_summary(files: list[Records]) -> None:
    """Write the picture, unless no CPU was measured."""
    PICTURE.parent.mkdir(exist_ok=True)
    titles = [TITLE.format_map(records.about) for records in files if records.about["device"] == "cpu"]
    draw_ratios(summary(files), PICTURE, inches=0, title="".join(titles[:1]))
