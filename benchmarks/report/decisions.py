"""Decisions that a GPU run makes: python -m benchmarks decide RESULTS.json

Each question, its measure and its rule were written before the first run; docs/gpu_decisions.md says what follows.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.kernel_cases import COMPILED
from benchmarks.peers import AMP, BASELINE, BY_BLOCK, RELAXED
from benchmarks.published_cases import CONVERTED, FLASH, FLEX, FUSED
from benchmarks.records import Records, Row, spread, times_faster
from benchmarks.report.tables import table
from benchmarks.scaler_step import APEX, INDUCTOR, RECAST, STOCK

NONE = f"{AMP}, fuse=none"


@dataclass(frozen=True)
class Question:
    """A question: does one peer beat another on certain cases, at least so many times as fast, or as lean."""

    about: str
    stage: str
    """A pattern, as `case`."""
    case: str
    ours: str
    other: str
    faster: float
    leaner: float = 0.0
    """Times less memory, which also makes the answer yes; 0: memory doesn't count."""


QUESTIONS = (
    *(
        Question(family, "kernels", case, AMP, COMPILED, 1.10, 1.10)
        for family, case in {
            "cross_entropy": "cross entropy",
            "linear_cross_entropy": "linear layer, cross entropy",
            "linear, and auto's 16 rows": r"linear, weight cast, \d+ rows.*",
        }.items()
    ),
    Question(
        "linear_cross_entropy, whole step",
        "training-fused",
        r".*\(linear_cross_entropy\): step",
        f"{AMP}, fuse=linear_cross_entropy",
        NONE,
        1.02,
        1.10,
    ),
    Question("gradients of weights in float32", "kernels", "gradient of a weight.*", AMP, COMPILED, 0.97),
    Question("numerics=eager", "training.*|inference.*|.*-training|architectures", ".*", AMP, RELAXED, 0.97),
    *(
        Question("the scaler's step", "scaler|compiled-steps", "clip and AdamW.*", AMP, other, least)
        for other, least in ((STOCK, 1.0), (RECAST, 1.4), (APEX, 1.0), (INDUCTOR, 1.10))
    ),
    Question("by block, against Inductor's by block", "by-block", ".*", BY_BLOCK[1], BY_BLOCK[0], 1.0),
    Question("by block, against the whole model", "by-block", ".*", BY_BLOCK[1], AMP, 0.9),
    Question("the whole model", "by-block", ".*", AMP, BASELINE, 1.10),
)

PUBLISHED = (
    ("linear layer", CONVERTED, "nanochat", 2.00e-3),
    ("linear layer, forward and backward", CONVERTED, "nanochat", 4.79e-3),
    ("linear layer, forward and backward, its input's gradient too", CONVERTED, "nanochat", 4.79e-3),
    ("backward of flex attention", FLEX.format("float32"), "OmniVoice", 61.8e-3),
    ("backward of flex attention", FLEX.format("bfloat16"), "OmniVoice", 5.1e-3),
)
"""Case, peer, who published it, seconds."""
FASTER = (
    ("backward of flex attention", FLEX.format("bfloat16"), FLEX.format("float32"), "OmniVoice", 12.1),
    ("AdamW", FLASH, FUSED, "FlashOptim", 1.08),
)
"""Case, peer, whom it beats, who published it, how many times as fast."""
AGREES = 1.15
"""Within this factor a figure agrees with a published one."""


def answers(records: Records) -> Iterator[tuple[str, ...]]:
    """Question, case, against whom, times as fast, times as lean, what the rule asks, yes or no."""
    for question in QUESTIONS:
        found = list(_cases(records, question))
        for case, rows in found:
            ours, other = rows[question.ours], rows[question.other]
            faster, leaner = times_faster(ours, other).middle, _leaner(ours, other)
            rule = f"{question.faster:g}" + f", or {question.leaner:g} as lean" * bool(question.leaner)
            kept = faster >= question.faster or (question.leaner and leaner >= question.leaner)
            verdict = "yes" if kept else "**no**"
            yield question.about, case, question.other, f"{faster:.2f}", f"{leaner:.2f}", rule, verdict
        if len(found) > 1:
            middle = median(times_faster(rows[question.ours], rows[question.other]).middle for _, rows in found)
            verdict = "yes" if middle >= question.faster else "**no**"
            shown = f"median of {len(found)}", question.other, f"{middle:.2f}", "", f"{question.faster:g}", verdict
            yield question.about, *shown
        if not found:
            yield question.about, "", question.other, "", "", "", "not measured"


def _cases(records: Records, question: Question) -> Iterator[tuple[str, dict[str, Row]]]:
    for stage in records.stages:
        if re.fullmatch(question.stage, stage):
            for case, rows in records.cases(stage).items():
                ran = {peer for peer, row in rows.items() if not row.why}
                if re.fullmatch(question.case, case) and {question.ours, question.other} <= ran:
                    yield case, rows


def _leaner(ours: Row, other: Row) -> float:
    return other.figures.get("peak_bytes", 0) / max(ours.figures.get("peak_bytes", 0), 1)


def calibration(records: Records) -> Iterator[tuple[str, ...]]:
    """Case, peer, source, published, measured, whether they agree."""
    cases = records.cases("published")

    def compared(case: str, peer: str, source: str, published: float, measured: float, unit: str) -> tuple[str, ...]:
        agrees = 1 / AGREES <= measured / published <= AGREES
        return case, peer, source, f"{published:.3g} {unit}", f"{measured:.3g} {unit}", "yes" if agrees else "**no**"

    for case, peer, source, seconds in PUBLISHED:
        row = cases.get(case, {}).get(peer)
        if row and not row.why:
            yield compared(case, peer, source, 1e3 * seconds, 1e3 * spread(row.figures["seconds"]).middle, "ms")
    for case, peer, slower, source, times in FASTER:
        rows = cases.get(case, {})
        if all(name in rows and not rows[name].why for name in (peer, slower)):
            measured = times_faster(rows[peer], rows[slower]).middle
            yield compared(case, f"{peer} against {slower}", source, times, measured, "times")


def main(arguments: Sequence[str]) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks decide", description=__doc__)
    parser.add_argument("results", type=Path)
    records = Records.load(parser.parse_args(arguments).results)
    print(table(["question", "case", "against", "times as fast", "as lean", "the rule asks", "kept"], answers(records)))
    print(table(["case", "peer", "source", "published", "measured", "agree"], calibration(records)))
    return 0
