"""python -m benchmarks.paper.one DEVICE CASE PEER   counts one case for one peer; prints the result as JSON, last."""

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.paper import device


def main(built: str, case: str, peer: str) -> None:
    """Load the device, which torch must find when it is imported, and count."""
    device.load(Path(built))
    device.describe()
    logging.disable(logging.WARNING)
    from benchmarks.paper.cases import Case
    from benchmarks.paper.cubins import describe_kernels
    from benchmarks.paper.lowering import count_graphs

    counted = Case(**json.loads(case))
    model, args = counted.build()
    graphs = count_graphs(model, args, counted.training, peer, counted.dtype)
    found = [asdict(graph) | {"kernels": describe_kernels(graph.kernels)} for graph in graphs]
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "graphs": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
