"""python -m benchmarks.paper.one DEVICE CASE PEER   counts one case for one peer; prints the result as JSON, last."""

import json
import logging
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.paper import device


def answer(case: dict[str, Any], peer: str) -> dict[str, Any]:
    """The counts of each graph, and the resources of its kernels on each architecture."""
    from benchmarks.paper.cases import Case  # these import torch, after the device is loaded
    from benchmarks.paper.cubins import usages
    from benchmarks.paper.lowering import counted

    made, graphs = Case(**case), []
    model, args = made.build()
    for counts in counted(model, args, made.training, peer, made.dtype):
        sizes, times = Counter[str](), Counter(label for label, _ in counts.parts)
        for label, size in counts.parts:
            sizes[label] += size
        parts = [[label, times[label], size] for label, size in sizes.most_common()]
        graphs.append(asdict(counts) | {"parts": parts, "kernels": usages(counts.kernels)})
    return {"parameters": sum(each.numel() for each in model.parameters()), "graphs": graphs}


if __name__ == "__main__":
    device.load(Path(sys.argv[1]))
    device.describe()
    logging.disable(logging.WARNING)
    print(json.dumps(answer(json.loads(sys.argv[2]), sys.argv[3])))
