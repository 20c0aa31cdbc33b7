"""Which ops between products give eager autocast's bits when compiled: every bfloat16 number, op by op.

python -m benchmarks.rounding writes the table of docs/numerics.md for the torch it runs on.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

PAGE = Path(__file__).parents[1] / "docs" / "numerics.md"

OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a + b": lambda a, b: a + b,
    "a * b": lambda a, b: a * b,
    "a / b": lambda a, b: a / b,
    "a * b + b": lambda a, b: a * b + b,
    "a * sigmoid(b)": lambda a, b: a * b.sigmoid(),
    "sigmoid": lambda a, b: a.sigmoid(),
    "tanh": lambda a, b: a.tanh(),
    "exp": lambda a, b: a.exp(),
    "silu": lambda a, b: F.silu(a),
    "relu": lambda a, b: F.relu(a),
    "sqrt": lambda a, b: a.abs().sqrt(),
    "gelu": lambda a, b: F.gelu(a),
    "gelu, tanh": lambda a, b: F.gelu(a, approximate="tanh"),
    "elu": lambda a, b: F.elu(a),
    "softplus": lambda a, b: F.softplus(a),
    "a + 0.1": lambda a, b: a + 0.1,
    "1.1 - a": lambda a, b: 1.1 - a,
    "a * 0.1": lambda a, b: a * 0.1,
    "add(a, b, alpha=0.3)": lambda a, b: torch.add(a, b, alpha=0.3),
    "lerp(a, b, 0.3)": lambda a, b: torch.lerp(a, b, 0.3),
}


def operands() -> tuple[Tensor, Tensor]:
    """Every finite bfloat16 number, and as many random ones, float32 so that autocast has something to cast."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = patterns[patterns.isfinite()]
    return finite, torch.randn(len(finite)).to(torch.bfloat16)


def differing(numerics: str) -> dict[str, tuple[float, float]]:
    """Per op the share of elements that differ from eager: (normal numbers, denormal numbers)."""
    a, b = operands()

    def every(a: Tensor, b: Tensor) -> list[Tensor]:
        return [op(a, b) for op in OPS.values()]

    found = torch.compile(every, backend="amp", options={"numerics": numerics})(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        eager = every(a, b)
    tiny = torch.finfo(torch.bfloat16).tiny
    shares = {}
    for name, ours, theirs in zip(OPS, found, eager, strict=True):
        differs = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
        normal = (a.abs() >= tiny) & ((theirs.abs() >= tiny) | (theirs == 0) | theirs.isnan())
        shares[name] = (differs[normal].float().mean().item(), differs[~normal].float().mean().item())
    return shares


def shown(share: float) -> str:
    """A share of elements in percent; the empty share says so."""
    return "equal" if share == 0 else f"{100 * share:.2g} %"


def with_table(page: str, rows: list[str], machine: str) -> str:
    """The page with these rows, measured on that machine, in the place of its own."""
    page, machines = re.subn(r"(?<=benchmarks\.rounding`, )on torch [^(]*\(\w+\)", machine, page)
    page, tables = re.subn(r"(\| op on bfloat16 .*\n\|.*\n)(?:\|.*\n)+", lambda m: m[1] + "\n".join(rows) + "\n", page)
    assert machines == tables == 1, "docs/numerics.md has one table, below the line that names its machine"
    return page


def main() -> None:
    """Measure, and write the table anew."""
    eager, relaxed = differing("eager"), differing("relaxed")
    rows = [f"| `{op}` | {shown(eager[op][0])} | {shown(eager[op][1])} | {shown(relaxed[op][0])} |" for op in OPS]
    machine = f"on torch {torch.__version__}, {platform.machine()} CPU ({torch.backends.cpu.get_cpu_capability()})"
    PAGE.write_text(with_table(PAGE.read_text(), rows, machine))


if __name__ == "__main__":
    main()
