"""Targets beside measurements, and where others are faster."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.peers import AMP, BASELINE, BY_BLOCK, LIMIT, PEERS
from benchmarks.records import Records, Row, of_bound, rival, spread, times_faster
from benchmarks.scaler_step import RECAST, REMAINDER, STOCK

UNTIMED = "broken"
"""The stage that asks on tiny models whether everything runs: its times mean nothing."""
SLOWER = 0.97
"""Below this multiple of a rival's speed a row is a loss."""
CAUSES: dict[str, str] = {
    r"cpu growth \d+ weights": "weights of 16 x 16: to ask whether one was written since its cast takes 0.3 µs, "
    "to cast its 256 numbers takes less",
    r"cpu inference GPT 23M, 1x16": "frozen weights are constants that nobody may write again. To ask whether one of "
    "49 was written takes 0.1 ms of a call, and 0.2 ms more go to what that displaces in the processor's caches: "
    "with the question left out, ours is 1.03 times as fast. By block Dynamo and the question come ten times a call",
    r"cpu small .*: step": "the first call after an update proves which copies are out of date and casts them anew: "
    "40 µs for six small weights in the midst of a step, where the processor's caches hold other things. Cast in the "
    'graph, as with `weights="every_call"`, they take 3 to 20 µs',
    r"cpu small SAC: call": "two graphs, each of which returns float32 where Inductor returns 16 bits, and needs "
    "copies proven when the processor's caches hold other things. "
    'With `outputs="autocast"` ours is 1.00 to 1.08 times as fast',
    r"cuda training .*": "the step waits for the host, whose times vary by a third from round to round: on the GPU "
    "Inductor's step takes 18.2 ms and ours 16.8. What a step of 75 weights takes of the host's time was 1.17 ms on an "
    "EPYC when this was measured; since then it is 0.60",
    r"compile .* cold": 'our passes take 0.2 s; Inductor\'s code for roundings in registers (`numerics="eager"`) takes '
    "longer to compile than what it replaces",
    r"compile .* warm": "our passes take 0.2 s and run again in each process, before Inductor's caches are asked",
}
"""Why we are slower where we are: patterns of "device stage case", and the cause found by profiling."""


@dataclass(frozen=True)
class Target:
    """A promise about one case, and whether it is kept."""

    promise: str
    case: str
    measured: float
    kept: bool


def targets(records: Records) -> Iterator[Target]:
    """Every promise that these results can be held to."""
    for stage, jobs in records.stages.items():
        for case, rows in records.cases(stage).items():
            if jobs and AMP in rows and not rows[AMP].why:
                yield from _of_case(records.about["device"], stage, case, rows)


def _of_case(device: str, stage: str, case: str, rows: dict[str, Row]) -> Iterator[Target]:
    def at_least(promise: str, least: float, other: str) -> Iterator[Target]:
        if other in rows and not rows[other].why:
            faster = times_faster(rows[AMP], rows[other]).middle
            yield Target(promise.format(least), case, faster, faster >= least)

    small = re.fullmatch(r"GPT [\d.]+[MB], 1x(1|16)", case)
    if stage.startswith("inference") and small:
        yield from at_least(f"at least {{}} times as fast as {BASELINE}", 1.9, BASELINE)
        yield from at_least(f"at least {{}} times as fast as {LIMIT}", 0.95, LIMIT)
    if all(name in rows and not rows[name].why for name in (BASELINE, *BY_BLOCK)):
        whole, blocks = (
            times_faster(rows[ours], rows[theirs]).middle for ours, theirs in ((AMP, BASELINE), BY_BLOCK[::-1])
        )
        yield Target(
            "by block at least 0.9 of what is gained on the whole model", case, blocks / whole, blocks >= 0.9 * whole
        )
    if stage.startswith("training"):
        yield from at_least(f"at least {{}} times as fast as {BASELINE}", 1.15 if device == "cpu" else 1.1, BASELINE)
    if stage.startswith("small"):
        yield from at_least(f"at least {{}} times as fast as {BASELINE}", 1.0, BASELINE)
    if stage == "scaler":
        least, other = (1.3, STOCK) if device == "cpu" else (1.4, RECAST)
        yield from at_least(f"at least {{}} times as fast as {other}", least, other)
        if "bound_seconds" in rows[AMP].figures:
            share = of_bound(rows[AMP])
            yield Target("at least 0.9 of the bound", case, share, share >= 0.9)
        if {REMAINDER, RECAST} <= rows.keys():
            time = 1 / times_faster(rows[REMAINDER], rows[RECAST]).middle
            yield Target(f"with remainders, at most 0.9 of the time of {RECAST}", case, time, time <= 0.9)
    if stage == "compile":
        most = 1.10 if case.endswith("cold start") else 1.15
        longer = 1 / times_faster(rows[AMP], rows[BASELINE]).middle
        yield Target(f"at most {most} times the compile time of {BASELINE}", case, longer, longer <= most)
    if stage == "import":
        seconds = spread(rows[AMP].figures["seconds"]).middle
        yield Target("at most 0.05 s", case, seconds, seconds <= 0.05)
    if "host_syncs" in (figures := rows[AMP].figures):
        yield Target("no host sync", case, figures["host_syncs"], figures["host_syncs"] == 0)


@dataclass(frozen=True)
class Loss:
    """A case in which somebody else is faster than we are, or ours fails."""

    case: str
    peer: str
    faster: float | None
    """How many times as fast as the other we are; None if ours doesn't run."""
    cause: str


def losses(records: Records) -> Iterator[Loss]:
    """Cases in which ours is slower than its rival by more than 3 %, or fails, each with the cause if known."""
    device = records.about["device"]
    for stage in records.stages:
        for case, rows in records.cases(stage).items():
            for peer, row in rows.items():
                if not peer.startswith(AMP) or (peer in PEERS and PEERS[peer].unable(device)):
                    continue
                other = rival(rows)
                if row.why:
                    yield Loss(f"{stage}, {case}", peer, None, row.why)
                elif other and stage != UNTIMED and (faster := times_faster(row, rows[other]).middle) < SLOWER:
                    yield Loss(f"{stage}, {case}", f"{peer} against {other}", faster, cause(device, stage, case))


def cause(device: str, stage: str, case: str) -> str:
    """The cause of a loss, as far as it is known."""
    known = [text for where, text in CAUSES.items() if re.search(where, f"{device} {stage} {case}")]
    return known[0] if known else "cause not known yet"
