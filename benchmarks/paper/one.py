"""python -m benchmarks.paper.one DEVICE CASE PEER   counts one case for one peer; prints the answer as JSON, last."""

import json
import logging
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.paper import device


def answer(case: dict[str, Any], peer: str) -> dict[str, Any]:
    """The counts of each graph, and what its kernels take on each architecture."""
    from benchmarks.paper.cases import Case
    from benchmarks.paper.counts import Counts
    from benchmarks.paper.cubins import CAPABILITIES, compiled
    from benchmarks.paper.lowering import counted

    def kernels_of(counts: Counts) -> dict[str, Any]:
        found: dict[str, Any] = {"failed": [], "spilled": []}
        for capability in CAPABILITIES:
            usages = []
            for name, source in counts.kernels.items():
                try:
                    usages.append(usage := compiled(source, capability))
                except Exception as error:
                    found["failed"].append(f"sm_{capability} {name}: {type(error).__name__}: {error}"[:300])
                    continue
                if usage.spilled:
                    found["spilled"].append(f"sm_{capability} {name}: {usage.spilled} bytes")
            found[f"sm_{capability}"] = {
                "kernels": len(usages),
                "registers": max((usage.registers for usage in usages), default=0),
                "shared": max((usage.shared for usage in usages), default=0),
                "occupancy": min((usage.occupancy for usage in usages), default=1.0),
            }
        return found

    def as_kept(counts: Counts) -> dict[str, Any]:
        kept = asdict(counts)
        total: Counter[str] = Counter()
        for label, size in counts.parts:
            total[label] += size
        times = Counter(label for label, _ in counts.parts)
        kept["parts"] = [[label, times[label], size] for label, size in total.most_common()]
        return kept | {"kernels": kernels_of(counts)}

    made = Case(**case)
    model, inputs = made.build()
    return {"graphs": [as_kept(each) for each in counted(model, inputs, made.training, peer, made.dtype)]}


if __name__ == "__main__":
    device.load(Path(sys.argv[1]))
    device.describe()
    logging.disable(logging.WARNING)
    print(json.dumps(answer(json.loads(sys.argv[2]), sys.argv[3])))
