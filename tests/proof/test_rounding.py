"""docs/numerics.md says op by op what has eager autocast's bits: that is so of every bfloat16 number."""

import re

import pytest
import torch
from torch.nn import functional as F

from ampcompile.torch_private import dispatcher
from tests.test_layout import ROOT

ROWS = re.findall(r"^\| `(.+)` \| (.*) \| .* \| (.*) \|$", (ROOT / "docs" / "numerics.md").read_text(), re.MULTILINE)
NAMES = vars(F) | {name: getattr(torch, name) for name in ("sigmoid", "tanh", "exp", "sqrt", "add", "lerp")}
OTHERWISE = {"sqrt": "sqrt(a.abs())", "gelu, tanh": "gelu(a, approximate='tanh')"}


def written(op: str) -> str:
    """An op of the table as an expression of `a` and `b`."""
    return op if re.search(r"\b[ab]\b", op) else OTHERWISE.get(op, f"{op}(a)")


def differing(numerics: str, ops: list[str]) -> dict[str, float]:
    """The share of elements that differ from eager, where neither operand nor result is denormal."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    a = patterns[patterns.isfinite()]
    b = torch.randn(len(a)).to(torch.bfloat16)
    names = dict(NAMES)
    exec(f"def every(a, b): return {', '.join(map(written, ops))},", names)
    found = torch.compile(names["every"], backend="amp", options={"numerics": numerics})(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        eager = names["every"](a, b)
    tiny, shares = torch.finfo(torch.bfloat16).tiny, {}
    for op, ours, theirs in zip(ops, found, eager, strict=True):
        normal = (a.abs() >= tiny) & ((theirs.abs() >= tiny) | (theirs == 0) | theirs.isnan())
        differs = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
        shares[op] = differs[normal].float().mean().item()
    return shares


@pytest.mark.skipif(dispatcher.TORCH < (2, 13), reason="Inductor 2.11 rounds only on CUDA, whatever it is told")
def test_what_the_page_calls_equal_is() -> None:
    promised = [op for op, eager, _ in ROWS if eager == "equal"]
    assert len(promised) >= 14 and differing("eager", promised) == dict.fromkeys(promised, 0.0)


def test_relaxed_rounds_less() -> None:
    assert differing("relaxed", ["a * sigmoid(b)"])["a * sigmoid(b)"] > 0.1
