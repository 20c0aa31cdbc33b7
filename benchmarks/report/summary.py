"""docs/pictures/speed.svg: what the results of one CPU say in a picture, for the README."""

from pathlib import Path

from benchmarks.peers import AMP, BASELINE
from benchmarks.records import Records, Spread
from benchmarks.report.plot import draw_ratios, ratios

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "speed.svg"
SHOWN = ("eager autocast", BASELINE, AMP)
STAGES = ("inference", "architectures", "training")


TITLE = """Speed in bfloat16 on {processor}, {cores} cores: the further right, the faster
1x16: one sequence of 16 tokens; 1x224: one image of 224 x 224; step: a training step"""


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
