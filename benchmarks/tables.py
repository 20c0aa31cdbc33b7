"""Results as tables of text: ratios within rounds, times in units that suit them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.peers import BASELINE, GRAPHS

Figures = Mapping[str, Any]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is words, the others are numbers."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines]) + "\n"


def duration(seconds: float) -> str:
    """A time in the unit that suits its size."""
    unit, scale = next((u, s) for u, s in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)) if seconds >= s or u == "µs")
    return f"{seconds / scale:.3g} {unit}"


def times_faster(ours: Figures, theirs: Figures) -> float:
    """How many times as fast: the median of the ratios within each round, so that drift cancels."""
    return median(their / our for our, their in zip(ours["seconds"], theirs["seconds"], strict=True))


COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "time": ("seconds", lambda rounds: duration(median(rounds))),
    "least and most": ("seconds", lambda rounds: f"{duration(min(rounds))} to {duration(max(rounds))}"),
    "on the GPU": ("gpu_seconds", duration),
    "GPU busy": ("busy_seconds", duration),
    "products, casts, step, rest": ("shares", lambda shares: ", ".join(f"{share:.0%}" for share in shares.values())),
    "launches": ("launches", lambda count: f"{count:.0f}"),
    "host: forward, backward, update": ("host_seconds", lambda parts: ", ".join(map(duration, parts))),
    "peak memory": ("peak_bytes", lambda size: f"{size / 2**20:.0f} MiB"),
    "until compiled": ("compile_seconds", lambda seconds: f"{seconds:.0f} s"),
    "error": ("error", lambda error: f"{error:.1e}"),
    "loss": ("losses", lambda losses: f"{losses[-1]:.4f}"),
}
"""Heading → figure, and how it is shown."""


def tabulate(peers: Mapping[str, Figures]) -> str:
    """One line for each peer on one case, beside Inductor under autocast or whoever is first; columns that nobody fills
    are left out, reasons stand below.
    """
    ran = {name: figures for name, figures in peers.items() if "why" not in figures}
    baseline = BASELINE if BASELINE in ran else next(iter(ran), "")
    used = [head for head, (figure, _) in COLUMNS.items() if any(figure in figures for figures in ran.values())]
    lines = []
    for name, figures in ran.items():
        cells = [COLUMNS[head][1](figures[COLUMNS[head][0]]) if COLUMNS[head][0] in figures else "" for head in used]
        lines.append([name, f"{times_faster(figures, ran[baseline]):.2f}", *cells])
    head = ["", f"times as fast as {baseline}", *used]
    reasons = [f"- {name}: {figures['why']}" for name, figures in peers.items() if "why" in figures]
    return (table(head, lines) if lines else "") + "".join(f"{line}\n" for line in reasons)


STEP_COLUMNS = ("time", "on the GPU", "launches", "peak memory", "loss")
"""Of a training step: the loss is that of the last of its first steps."""


def tabulate_steps(stages: Mapping[str, Mapping[str, Figures]]) -> str:
    """One table of all steps on a GPU: what each takes by the wall and of the GPU, and both beside stock's best way."""
    lines = []
    for stage, peers in stages.items():
        ran = {name: figures for name, figures in peers.items() if "gpu_seconds" in figures}
        stock = [median(ran[name]["seconds"]) for name in (BASELINE, BASELINE + GRAPHS) if name in ran]
        busy = [ran[name]["gpu_seconds"] for name in (BASELINE, BASELINE + GRAPHS) if name in ran]
        for name, figures in ran.items():
            shown = [(COLUMNS[head][1], figures.get(COLUMNS[head][0])) for head in STEP_COLUMNS]
            cells = ["" if figure is None else show(figure) for show, figure in shown]
            best = [min(stock) / median(figures["seconds"]), min(busy) / figures["gpu_seconds"]] if stock else []
            lines.append([stage, name, *cells, *(f"{ratio:.2f}" for ratio in best)])
    beside = ["times as fast as stock's best", "by the GPU's time"]
    rows = [line + [""] * (9 - len(line)) for line in lines]
    return table(["", "way", *STEP_COLUMNS, *beside], rows) if rows else ""
