"""python -m benchmarks.charts [folder]   draws the pages' pictures from the committed results; so does `make docs`.

Each picture shows what one sentence of its page says: `speed`, `counted`, `held` and `losses`.
"""

import sys
from collections.abc import Callable, Mapping
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.peers import AMP, BASELINE, FP8, GRAPHS, TORCHAO
from benchmarks.records import RESULTS, Records
from benchmarks.tables import times_faster

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
PROOF = FOLDER.parents[1] / "proof" / "results"
COLOURS = {"Inductor float32": "#9aa5b1", "eager autocast": "#d9a441", "Inductor under autocast": "#6b7c93"}
COLOURS |= {"amp": "#2f6fde", "bytes": "#2f6fde", "launches": "#57a773", "torchao float8": "#57a773"}
COLOURS |= {"parameter and master": "#2f6fde", "gradient": "#57a773", "states": "#d9a441", "copy": "#9aa5b1"}
COLOURS |= {"mean": "#2f6fde", "standard error": "#9aa5b1"}
Bars = dict[str, dict[str, float]]


def speed() -> Bars:
    """Training steps, times as fast as Inductor under autocast: hardware → peer → times."""
    stock = "Inductor under autocast"
    usual = {"Inductor float32": "Inductor float32", "eager autocast": "eager autocast", stock: BASELINE, "amp": AMP}
    graphs = {stock: BASELINE + GRAPHS, "amp": AMP + GRAPHS}
    fp8 = {stock: BASELINE, TORCHAO: TORCHAO, "amp": FP8}
    avx512 = "GPT 23M, 4x128, as AVX512_CORE, one thread: clipped step"
    rows = {
        "H200, Llama-like, width 4096, fp8": ("gpu-h200-fp8", "Llama d4096, 4x2048: clipped step", fp8),
        "H200, Llama-like, width 4096": ("gpu-h200-steps", "Llama d4096, 4x2048: clipped step", usual),
        "H200, BERT, CUDA graphs": ("gpu-h200-steps", "BERT classifier, 32x128: clipped step", graphs),
        "AMD EPYC, AVX512-BF16, GPT 23M": ("cpu-amd-epyc", "GPT 23M, 4x128: clipped step", usual),
        "Intel Xeon, AMX hidden, GPT 23M": ("cpu-intel-xeon", "GPT 23M, 4x128: clipped step", usual),
        "AVX-512 alone, GPT 23M": ("cpu-amd-epyc", avx512, usual),
    }
    found: Bars = {}
    for row, (file, stage, names) in rows.items():
        peers = stages(file)[stage]
        found[row] = {
            name: times_faster(peers[peer], peers[names[stock]]) for name, peer in names.items() if peer in peers
        }
    return found


def counted() -> Bars:
    """Training steps counted for a GPU, in parts of Inductor's under autocast: model → figure → part."""
    found: Bars = {}
    for stage, jobs in stages("gpu-counted").items():
        model, _, rest = stage.partition(", ")
        if "training step, bf16" in rest and "by block" not in rest:
            ours, stock = jobs[AMP], jobs[BASELINE]
            found[model] = {"bytes": ours["bytes"] / stock["bytes"], "launches": ours["launches"] / stock["launches"]}
    return found


def held() -> Bars:
    """Bytes a parameter that are held between two steps of AdamW, as docs/memory.md says: options → kind → bytes."""
    page = (FOLDER.parent / "memory.md").read_text()
    lines = page.partition("\n\n| | parameter")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.replace("`", "").split("|")[1:-2]] for line in lines]
    kinds = ("parameter and master", "gradient", "states", "copy")
    return {
        name: {kind: float(number) for kind, number in zip(kinds, numbers, strict=True) if number}
        for name, *numbers in rows
    }


def losses() -> Bars:
    """How far from usual training ends, in thousandths of loss: way, model → mean over seeds, its standard error."""
    found: Bars = {}
    for file, what, usual in (("states", "states", "float32"), ("saved", "kept", "in 16 bits")):
        seeds = [*Records.load(PROOF / f"{file}.json").stages.values()]
        for model in (name for name in seeds[0] if all(name in seed for seed in seeds)):
            runs = [seed[model]["figures"] for seed in seeds]
            for way in runs[0].keys() - {usual}:
                apart = [1e3 * (run[way][0] - run[usual][0]) for run in runs]
                row = f"{what} {way.replace('`', '')}, {model}"
                found[row] = {"mean": mean(apart), "standard error": stdev(apart) / sqrt(len(apart))}
    return dict(sorted(found.items()))


def stages(file: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The stages of a file of results."""
    return Records.load(RESULTS / f"{file}.json").stages


CHARTS: Mapping[str, tuple[Callable[[], Bars], str]] = {
    "speed": (speed, "a training step, times as fast as Inductor under autocast"),
    "counted": (counted, "a training step, in parts of Inductor's under autocast"),
    "held": (held, "bytes a parameter between two steps of AdamW"),
    "losses": (losses, "loss after 900 steps beside training as usual, in thousandths"),
}
"""Picture → its bars, and the words at its axis."""
STACKED = {"held"}
"""Pictures whose bars of a row stand one behind the other."""


def draw(name: str, folder: Path) -> None:
    """Draw one picture: a group of bars for each row."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.hashsalt": name, "svg.fonttype": "none"})
    from matplotlib import pyplot

    bars, words, stacked = CHARTS[name][0](), CHARTS[name][1], name in STACKED
    series = [*dict.fromkeys(kind for row in bars.values() for kind in row)]
    height = sum(0.2 * (1 if stacked else len(row)) + 0.15 for row in bars.values())
    figure, axes = pyplot.subplots(figsize=(8, 0.9 + height))
    place, ticks = 0.0, []
    labelled: set[str] = set()
    for row in bars.values():
        ticks.append(place if stacked else place + (len(row) - 1) / 2)
        begin = 0.0
        for kind in series:
            if kind in row:
                label = "_" if kind in labelled else kind
                bar = axes.barh(place, row[kind], 0.85, begin, color=COLOURS[kind], label=label)
                at = {"label_type": "center"} if stacked else {"padding": 2}
                axes.bar_label(bar, [f"{row[kind]:.3g}"], fontsize=8, **at)
                labelled.add(kind)
                begin, place = (begin + row[kind], place) if stacked else (0.0, place + 1)
        place += 1.6 if stacked else 0.6
    axes.set_yticks(ticks, list(bars), fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(words, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    left, right = axes.get_xlim()
    axes.set_xlim(1.15 * left, 1.05 * right)  # room for numbers
    figure.legend(loc="upper center", ncols=len(series), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.svg", format="svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Draw all pictures."""
    for name in CHARTS:
        draw(name, Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)


if __name__ == "__main__":
    main()
