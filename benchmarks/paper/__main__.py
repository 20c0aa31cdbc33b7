"""python -m benchmarks.paper [--jobs N] [--only TEXT] [--all] [--options] [--fp8] [--tiny]   what a GPU would run

Each case is counted for each peer in a process of its own. Totals are printed as tables, and all that was counted is
written to build/paper.json. Exits with 1 if a kernel can't be compiled, or one of ours spills registers.
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.paper import device
from benchmarks.paper.cases import AMP, DEFAULT, FP8_PEERS, IN_FP8, MORE, OPTIONS, PEERS, SMALL, STOCK, TORCHAO, Case
from benchmarks.tables import table

BUILT = ROOT / "build" / "paper.json"
OURS = "amp_"
"""Prefix of the names of our Triton kernels."""
PRODUCT = re.compile(r"(aten\.)?(_scaled_|_grouped_|b?add|b)?mm\b\S*|(aten\.)?convolution\S*")
"""Labels of library kernels that multiply: those of fused kernels, which quantize for one, hold several names."""
COLUMNS = {"launches": 1, "calls": 1, "bytes": 1e9, "outside": 1e9, "flops": 1e12, "saved": 1e9, "peak": 1e9}
"""Count → the unit in which it is shown. "outside": bytes of kernels that don't multiply."""
Graphs = list[dict[str, Any]]


def main() -> int:
    """Count, print, write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--all", action="store_true", help="more models, too: half an hour on two cores")
    parser.add_argument("--options", action="store_true", help="options of amp that claim to save, in training")
    parser.add_argument("--fp8", action="store_true", help="in place of all these, products in fp8, torchao's too")
    parser.add_argument("--tiny", action="store_true", help="the small cases of the tests")
    given = parser.parse_args()
    cases = [case for case in (SMALL if given.tiny else DEFAULT + MORE * given.all) if given.only in str(case)]
    todo = [(case, peer) for case in cases for peer in PEERS]
    todo += [(case, peer) for case in cases for peer in OPTIONS if given.options and case.training and peer != AMP]
    if given.fp8:
        there = importlib.util.find_spec("torchao") is not None
        todo = [(case, peer) for case in IN_FP8 for peer in FP8_PEERS if there or peer != TORCHAO]
        print("" if there else "torchao is not installed: what is counted beside it is left out", file=sys.stderr)
    BUILT.parent.mkdir(exist_ok=True)
    built = device.build(BUILT.parent)
    with ThreadPoolExecutor(given.jobs) as pool:
        answers = list(pool.map(lambda each: _count(str(built), *each), todo))
    found: dict[str, dict[str, Any]] = {}
    for (case, peer), answer in zip(todo, answers, strict=True):
        found.setdefault(str(case), {})[peer] = answer
    BUILT.write_text(json.dumps(found) + "\n")
    print(*(show(case, peers) for case, peers in found.items()), sep="\n")
    print(*(failures := list(find_failures(found))), sep="\n")
    return int(bool(failures))


def _count(built: str, case: Case, peer: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.paper.one", built, json.dumps(asdict(case)), peer]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    print(f"{case}: {peer}", file=sys.stderr, flush=True)
    return {"error": run.stderr[-3000:]} if run.returncode else json.loads(run.stdout.splitlines()[-1])


def add_up(graphs: Graphs, what: str) -> int:
    """A count of a whole step: the sum over its graphs, or for a peak the maximum."""
    if what == "outside":
        return sum(size for graph in graphs for label, size in graph["parts"] if not PRODUCT.fullmatch(label))
    counts = [sum(graph["calls"].values()) if what == "calls" else graph[what] for graph in graphs]
    return max(counts) if what == "peak" else sum(counts)


def show(case: str, peers: dict[str, Any]) -> str:
    """The totals of each peer, beside the first's, and the kernels that move most bytes."""
    graphs = {peer: answer["graphs"] for peer, answer in peers.items() if "graphs" in answer}
    lines = []
    for peer, counted in graphs.items():
        cells = []
        for what, unit in COLUMNS.items():
            total, stock = add_up(counted, what), add_up(graphs.get(STOCK, counted), what)
            cells.append(f"{total / unit:.4g}" + (f" ({total / stock:.2f})" if stock else ""))
        lines.append([peer, *cells])
    units = {1e9: "GB ", 1e12: "T"}
    head = [f"{case}: count (of {STOCK}'s)", *(f"{units.get(unit, '')}{what}" for what, unit in COLUMNS.items())]
    return table(head, lines) + "\n" + table(["MB of kernels that compute", *graphs], _list_parts(graphs))


def _list_parts(peers: dict[str, Graphs]) -> Iterator[list[str]]:
    sizes: dict[str, Counter[str]] = {}
    for peer, graphs in peers.items():
        for label, size in (part for graph in graphs for part in graph["parts"]):
            sizes.setdefault(label, Counter())[peer] += size
    for label, by_peer in sorted(sizes.items(), key=lambda item: -max(item[1].values()))[:12]:
        yield [f"`{label}`", *(f"{by_peer[peer] / 1e6:,.1f}" for peer in peers)]


def find_failures(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield what couldn't be counted, kernels that can't be compiled, and kernels of ours that spill registers."""
    for case, peers in found.items():
        for peer, answer in peers.items():
            yield from [f"{case}, {peer}: {answer['error']}"] if "error" in answer else []
            for kernels in (graph["kernels"] for graph in answer.get("graphs", ())):
                bad = [*kernels["failed"], *(each for each in kernels["spilled"] if f" {OURS}" in each)]
                yield from (f"{case}, {peer}: {kernel}" for kernel in bad)


if __name__ == "__main__":
    sys.exit(main())
