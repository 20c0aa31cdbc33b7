"""python -m benchmarks.paper.one DEVICE CASE PEER   counts one case for one peer; prints the result as JSON, last."""

import json
import logging
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.paper import device

if TYPE_CHECKING:
    from benchmarks.paper.cases import Case


def answer(case: "Case", peer: str) -> dict[str, Any]:
    """The counts of each graph of a case, and the resources of its kernels on each architecture."""
    from benchmarks.architectures import GPTS  # these import torch, after the device is loaded
    from benchmarks.paper.cases import BY_BLOCK, DEPTHS
    from benchmarks.paper.depth import at_depth, repeated

    whole = case.model.removesuffix(BY_BLOCK)
    if case.model in DEPTHS and not case.layers:
        few = {layers: answer(replace(case, layers=layers), peer) for layers in DEPTHS[case.model]}
        return at_depth(few, GPTS[whole].layers)
    return _counted(case, peer) if whole == case.model else repeated(_counted(case, peer), GPTS[whole].layers)


def _counted(case: "Case", peer: str) -> dict[str, Any]:
    from benchmarks.paper.cubins import usages
    from benchmarks.paper.lowering import counted

    graphs = []
    model, args = case.build()
    for counts in counted(model, args, case.training, peer, case.dtype):
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
    from benchmarks.paper.cases import Case

    print(json.dumps(answer(Case(**json.loads(sys.argv[2])), sys.argv[3])))
