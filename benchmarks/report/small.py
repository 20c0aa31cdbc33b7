"""Small models in a table and in a sentence, which the pages that quote them hold between two marks."""

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.peers import AMP, BASELINE
from benchmarks.records import Records, Row, ratios, spread, times_faster
from benchmarks.report.tables import duration, table
from benchmarks.small_models import MODELS
from benchmarks.small_steps import CALL, NAMES, STEP

ROOT = Path(__file__).parents[2]
MARKED = re.compile(r"(?<=<!-- small models, by python -m benchmarks docs -->).*?(?=<!-- end -->)", re.DOTALL)
Cases = Mapping[str, Mapping[str, Row]]


def small_table(cases: Cases) -> str:
    """A line for each case: our time, and how many times as fast we are as each peer, median and range of rounds."""
    others = [BASELINE, *(name for name in NAMES if name not in (BASELINE, AMP))]
    lines = []
    for case, rows in _complete(cases).items():
        rounds = [ratios(rows[AMP], rows[name]) for name in others]
        cells = [f"{spread(times).middle:.2f} ({min(times):.2f} to {max(times):.2f})" for times in rounds]
        lines.append([case, duration(spread(rows[AMP].figures["seconds"])), *cells])
    return table(["amp, times as fast as", "amp's time", *others], lines)


def sentence(cases: Cases) -> str:
    """From which to which multiple of Inductor's speed under autocast, and of eager's in float32."""

    def between(what: str, peer: str) -> str:
        times = [times_faster(rows[AMP], rows[peer]).middle for c, rows in _complete(cases).items() if c.endswith(what)]
        return f"{min(times):.2f} to {max(times):.2f} times"

    return "; ".join(
        f"a {what} has {between(what, BASELINE)} the speed of Inductor under autocast, "
        f"{between(what, 'eager fp32')} that of eager float32"
        for what in (STEP, CALL)
    )


def fill(files: list[Records]) -> None:
    """Write figures of CPUs that have all: a table of each into the page on performance, the README has the first's."""
    cpus = [records for records in files if records.about["device"] == "cpu"]
    found = [
        ("{processor}, {cores} cores, {threads} threads".format_map(records.about), cases)
        for records in cpus
        if len(_complete(cases := records.cases("small"))) == 2 * len(MODELS)
    ]
    if not found:
        return
    machine, cases = found[0]
    texts = {
        "README.md": f"on {machine}, {sentence(cases)}",
        "docs/performance.md": "".join(f"\n\n{machine}:\n\n{small_table(cases)}" for machine, cases in found),
    }
    for page, text in texts.items():
        (ROOT / page).write_text(MARKED.sub(text, (ROOT / page).read_text()))


def _complete(cases: Cases) -> Cases:
    return {case: rows for case, rows in cases.items() if all(n in rows and not rows[n].why for n in NAMES)}
