"""Write docs/gpu_paper.md: counts of the work that a GPU would run."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.paper import results
from benchmarks.paper.cases import AMP, CONVERTED, DEPTHS, OPTIONS, PEERS, STOCK

_COLUMNS = "| | launches | library calls | bytes | saved | peak |\n|---|--:|--:|--:|--:|--:|"
PAGE = results.ROOT / "docs" / "gpu_paper.md"
FEW, MORE = DEPTHS["GPT 1.3B"]
HEAD = f"""# Counted, not measured: what a GPU would run

No GPU has run these. Each model is traced for an H200 on a machine without one, lowered by Inductor as on a GPU, and
what comes out is counted; `make paper` does it again. A launch is one of a Triton kernel, ours included; a library call
is one of cuBLAS, cuDNN or torch's own kernels. Bytes are what each kernel reads and writes, every address once; what
caches save isn't known. "Saved" is what is kept for backward, beside the model's inputs and weights; of a part of
a larger buffer the whole buffer counts, so an attention's query, key and value count thrice. "Peak" is the most that is
alive at once, beside them; a kernel that writes in place of what it reads counts both, as in the UNet's peak.
Every Triton kernel is compiled to machine code for sm_80, sm_90 and sm_100: "registers" are the most that a thread of
one takes on sm_90, and "spills" counts kernels that need more than there are, on any of the three.

*{STOCK}* is `torch.compile` inside `torch.autocast`. *{CONVERTED}* has the whole model in bfloat16: not
mixed precision any more, and so a bound that nobody has to reach. *{AMP}* is `torch.compile(model, backend="amp")` with
default options. In a training step each of its copies of weights is cast once, in one launch (`amp_cast`). Our scaler's
fused step writes them as it updates the weights, and saves two thirds of that. What an optimizer's step takes has a
[table of its own](#with-the-scalers-step).

Of an op that Inductor can't look into, what its code does is counted by hand (`benchmarks/paper/opaque.py`).

GPT 1.3B isn't traced with its 24 layers: {FEW} and {MORE} are counted, and each further layer adds what the last one
added. Such a line through 2 and 3 layers of the 124 M shape meets the count of 5: exactly for {AMP}, within 0.1 % of
the bytes for {STOCK}. A GPT *by block* is its blocks alone, each compiled by itself: what is outside
them isn't compiled, and the same for each peer. *State space* is two blocks with selective scans in plain PyTorch.

[What the counts may mean in time](gpu_estimate.md) is an estimate.
"""

CLIP, UNSCALE, ADAMW = 4 + 8, 8, 28
"""Bytes that torch's step moves per parameter."""
OUR_STEP = 4 + 28
WHOLE_STEPS = f"""GB of forward and backward, and of a step that clips gradients to a norm and updates weights by AdamW,
through a scaler. Steps are counted by formula. torch's moves {CLIP + ADAMW} bytes a parameter: it takes the norm of the
gradients (4), multiplies them (8), and reads and writes weight, gradient and moments (28); in float16 it unscales them
before ({UNSCALE}). Ours reads gradients for their norm (4), updates (28), and writes the copies of weights (2 for each
number), so that no graph casts them.

| | {STOCK} | {AMP} | |
|---|--:|--:|--:|"""


def write() -> None:
    """Write the page from the stored counts."""
    PAGE.write_text("\n".join([HEAD.rstrip(), *_summary(), *_whole_steps(), *_options(), *_cases()]) + "\n")


def total(graphs: list[dict[str, Any]], what: str) -> int:
    """A count of a whole step: the sum over its graphs, or for a peak the maximum."""
    counts = [sum(graph["calls"].values()) if what == "calls" else graph[what] for graph in graphs]
    return max(counts) if what == "peak" else sum(counts)


def _summary() -> Iterator[str]:
    yield f"\n## {AMP} beside {STOCK}\n"
    yield f"Less than 1 is less work.\n\n{_COLUMNS}"
    for case, peers in results.read().items():
        if STOCK in peers and AMP in peers:
            yield f"| {case} | {_ratios(peers[AMP], peers[STOCK])} |"


def _whole_steps() -> Iterator[str]:
    yield "\n## With the scaler's step\n"
    yield WHOLE_STEPS
    for case, peers in results.read().items():
        if "training" in case and STOCK in peers and AMP in peers:
            step = ADAMW + CLIP + UNSCALE * case.endswith(" f16")
            yield f"| {case} | {_whole_step(peers[STOCK], peers[AMP], step)} |"


def _whole_step(stock: dict[str, Any], ours: dict[str, Any], step: int) -> str:
    graphs = [graph for graph in ours["graphs"] if graph["kind"] != "copies"]
    copied = (total(ours["graphs"], "bytes") - total(graphs, "bytes")) // (4 + 2)  # bytes that a cast reads and writes
    stock_bytes = total(stock["graphs"], "bytes"), step * stock["parameters"]
    our_bytes = total(graphs, "bytes"), OUR_STEP * ours["parameters"] + 2 * copied
    cells = [f"{graphs / 1e9:.3g} + {step / 1e9:.3g}" for graphs, step in (stock_bytes, our_bytes)]
    return f"{' | '.join(cells)} | {sum(our_bytes) / sum(stock_bytes):.2f}"


def _options() -> Iterator[str]:
    yield "\n## Options beside the defaults\n"
    yield f"Of {AMP} with an option to {AMP} without, where both were counted with the same code.\n\n{_COLUMNS}"
    for case, peers in results.read().items():
        for peer, counted in peers.items():
            if peer in OPTIONS and peer != AMP and counted["code"] == peers[AMP]["code"]:
                yield f"| {case}: {peer.removeprefix(AMP + ', ')} | {_ratios(counted, peers[AMP])} |"


def _ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    counts = ("launches", "calls", "bytes", "saved", "peak")
    return " | ".join(_ratio(total(ours["graphs"], what), total(theirs["graphs"], what)) for what in counts)


def _ratio(ours: int, theirs: int) -> str:
    return f"{ours / theirs:.2f}" if theirs else "-"


def _cases() -> Iterator[str]:
    for case, peers in results.read().items():
        yield f"\n## {case}\n"
        yield "| | launches | library calls | GB | TFLOP | saved GB | peak GB | roundings | registers | spills |"
        yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
        for peer, counted in peers.items():
            yield f"| {peer} | {' | '.join(_cells(counted['graphs']))} |"
        yield from _parts({peer: counted for peer, counted in peers.items() if peer in PEERS})


def _cells(graphs: list[dict[str, Any]]) -> Iterator[str]:
    for what, unit in (("launches", 1), ("calls", 1), ("bytes", 1e9), ("flops", 1e12), ("saved", 1e9), ("peak", 1e9)):
        count = total(graphs, what)
        yield str(count) if unit == 1 else f"{count / unit:.3g}"
    yield str(total(graphs, "roundings"))
    yield str(max(graph["kernels"]["sm_90"]["registers"] for graph in graphs))
    yield str(sum(len(graph["kernels"]["spilled"]) for graph in graphs))


def _parts(peers: dict[str, Any]) -> Iterator[str]:
    """Yield a table of the kernels that move most bytes, by the operations that Inductor fused in them."""
    sizes: dict[str, Counter[str]] = {}
    for peer, counted in peers.items():
        for graph in counted["graphs"]:
            for label, _, size in graph["parts"]:
                sizes.setdefault(label, Counter())[peer] += size
    least = max(sum(sizes[label][peer] for label in sizes) for peer in peers) / 50
    yield f"\n| MB of kernels that compute | {' | '.join(peers)} |\n|---|{'--:|' * len(peers)}"
    for label, by_peer in sorted(sizes.items(), key=lambda item: -max(item[1].values())):
        if max(by_peer.values()) >= least:
            cells = (f"{by_peer[peer] / 1e6:,.0f}" for peer in peers)
            yield f"| `{label}` | {' | '.join(cells)} |"
