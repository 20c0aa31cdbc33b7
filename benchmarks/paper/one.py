"""python -m benchmarks.paper.one DEVICE CASE PEER ...   counts cases, each for a peer; the last lines are the results.

The device has to be there before torch is, so that whoever counts has a process for it.
"""

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.paper import device


def main(built: str, *pairs: str) -> None:
    """Load the device, which torch must find when it is imported, and count; a line of JSON for each pair."""
    device.load(Path(built))
    device.describe()
    logging.disable(logging.WARNING)
    from benchmarks.paper.cases import STOCK, Case
    from benchmarks.paper.cubins import describe_kernels
    from benchmarks.paper.lowering import count_graphs

    lines = []
    for case, peer in zip(pairs[::2], pairs[1::2], strict=True):
        counted = Case(**json.loads(case))
        model, args = counted.build()
        graphs = count_graphs(model, args, counted.training, peer, counted.dtype)
        # Whether Inductor's kernels compile where nothing is ours is no question.
        kernels = [describe_kernels({} if peer == STOCK else graph.kernels) for graph in graphs]
        found = [asdict(graph) | {"kernels": each} for graph, each in zip(graphs, kernels, strict=True)]
        lines.append(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "graphs": found}))
    print(*lines, sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
