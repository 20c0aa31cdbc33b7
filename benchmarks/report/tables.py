"""Rows as Markdown tables: ratios first, absolute figures after them."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.peers import AMP
from benchmarks.records import Row, Spread, of_bound, rival, spread, times_faster

Cell = Callable[[Row], str]
LOSS_AFTER = 10
"""Steps after which losses are compared: later ones are those of chance on tokens drawn at random."""


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is words, the others are numbers."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines]) + "\n"


def figure(name: str, show: Callable) -> Cell:
    """The cell of a figure that a row may lack."""
    return lambda row: show(row.figures[name]) if name in row.figures else ""


def case_table(rows: dict[str, Row], **more: Cell) -> str:
    """Every peer that ran on one case; columns that nobody fills are left out."""
    ran = {peer: row for peer, row in rows.items() if not row.why}
    steps = min([LOSS_AFTER, *(len(row.figures.get("losses", ())) for row in ran.values())])
    columns: dict[str, Cell] = {
        "time": lambda row: duration(spread(row.figures["seconds"])),
        **more,
        "of the bound": bound_share,
        "on the GPU": figure("device_seconds", lambda seconds: f"{1e3 * seconds:.3g} ms"),
        "on the host": figure("host_seconds", lambda seconds: f"{1e3 * seconds:.3g} ms"),
        "peak memory": figure("peak_bytes", lambda size: f"{size / 2**20:.0f} MiB"),
        "first compile": figure("compile_seconds", lambda seconds: f"{seconds:.1f} s"),
        "graphs": figure("graphs", str),
        "casts": figure("casts", str),
        "cast": figure("cast_bytes", lambda size: f"{size / 2**20:.1f} MiB"),
        "launches": figure("launches", str),
        "host syncs": figure("host_syncs", str),
        "error": figure("error", lambda error: f"{error:.1e}"),
        f"loss after {steps} steps": figure("losses", lambda losses: f"{losses[steps - 1]:.4f}"),
    }
    if other := rival(rows):
        columns = {f"times as fast as {other}": lambda row: ratio(times_faster(row, ran[other]))} | columns
    cells = {name: [cell(row) for row in ran.values()] for name, cell in columns.items()}
    used = {name: column for name, column in cells.items() if any(column)}
    peers = [f"**{peer}**" if peer.startswith(AMP) else peer for peer in ran]
    return table(["", *used], zip(peers, *used.values(), strict=True))


def loops_table(cases: Mapping[str, Mapping[str, Row]]) -> str:
    """A line for each part of a step: its time, its calls, and the share of the speed that memory or units allow."""
    parts = [(part, row) for part, rows in cases.items() for row in rows.values() if not row.why]
    lines = [
        [part, duration(spread(row.figures["seconds"])), str(row.figures["calls"]), bound_share(row)]
        for part, row in parts
    ]
    return table(["", "time", "calls", "of the bound"], lines)


def bound_share(row: Row) -> str:
    """The share that a row reached of the speed that memory allows, where that was measured in its rounds."""
    return f"{100 * of_bound(row):.0f} %" if "bound_seconds" in row.figures else ""


def ratio(times: Spread) -> str:
    """A multiple with its quartiles."""
    return f"**{times.middle:.2f}** ({times.low:.2f} to {times.high:.2f})"


def duration(times: Spread) -> str:
    """A time with its quartiles, in the unit that suits its size."""
    unit, scale = next((u, s) for u, s in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)) if times.middle >= s or u == "µs")
    low, middle, high = (f"{value / scale:.3g}" for value in times)
    return f"{middle} {unit} ({low} to {high})"


def unable(cases: Iterable[dict[str, Row]]) -> str:
    """The peers that couldn't run and why, each reason once."""
    reasons = dict.fromkeys(f"- {peer}: {row.why}" for rows in cases for peer, row in rows.items() if row.why)
    return "Not measured:\n\n" + "\n".join(reasons) + "\n" if reasons else ""
