"""Store the counts in the repository, with a hash of the counted code."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.paper.cases import OPTIONS, PEERS, Case

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).with_name("counted.json")
OURS = "amp_"
"""Prefix of the names of our Triton kernels."""
_COUNTS_NOTHING = ("page.py", "estimate.py", "results.py", "__main__.py")


def code(peer: str) -> str:
    """A hash of the code that counts and, if the peer is ours, of the package."""
    folders = ("benchmarks/paper", *(("ampcompile", "passes", "kernels") if peer in OPTIONS else ()))
    sources = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    others = [ROOT / "benchmarks" / name for name in ("architectures.py", "models.py", "unet.py")]
    text = "".join(path.read_text() for path in [*sources, *others] if path.name not in _COUNTS_NOTHING)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read() -> dict[str, Any]:
    """The stored counts, by case and peer."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def counted_with(case: Case, peer: str) -> str | None:
    """The hash of the code with which a case was counted."""
    return read().get(str(case), {}).get(peer, {}).get("code")


def keep(case: Case, peer: str, counted: dict[str, Any]) -> None:
    """Store the counts of one case and peer."""
    stored = read()
    stored.setdefault(str(case), {})[peer] = counted
    KEPT.write_text(json.dumps(stored, indent=1) + "\n")


def bad() -> Iterator[str]:
    """Yield kernels that can't be compiled, and kernels of ours that spill registers."""
    for case, peers in read().items():
        for peer in PEERS:
            for graph in peers.get(peer, {}).get("graphs", ()):
                kernels = graph["kernels"]
                for kernel in [*kernels["failed"], *(each for each in kernels["spilled"] if f" {OURS}" in each)]:
                    yield f"{case}, {peer}, {graph['kind']}: {kernel}"
