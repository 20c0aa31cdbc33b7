"""An audit as text: what is worst stands first, numbers are short, and everything fits."""

import math
from dataclasses import replace

import torch

from ampcompile.auditing.numbers import Numbers
from ampcompile.auditing.records import OpNumbers
from ampcompile.auditing.result import Audit
from ampcompile.auditing.table import MODULES, OPS, render


def op(name: str, module: str, local: float | None = 0.001, overflowed: float = 0.0, flushed: float = 0.0) -> OpNumbers:
    numbers = Numbers(local, math.inf, 1234.5, overflowed, flushed, 100)
    return OpNumbers(name, module, "/home/me/model.py:7", name == "aten.mm", torch.bfloat16, numbers)


def audit(*ops: OpNumbers, unmeasured: tuple[str, ...] = ()) -> Audit:
    return Audit(ops, [0.0123, math.inf], {}, 0.25, unmeasured, torch.float64)


def rows(text: str, heading: str) -> list[list[str]]:
    """The rows of the table with this heading, split at blanks."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(heading))
    end = next((i for i in range(start, len(lines)) if not lines[i]), len(lines))
    return [line.split() for line in lines[start + 1 : end]]


def test_the_head_tells_of_the_whole_run() -> None:
    text = render(audit(op("aten.add", "a"), op("aten.mm", "", overflowed=0.5), unmeasured=("my.op", "my.other")), 120)
    assert text.splitlines()[:5] == [
        "mixed run against f64: 2 ops",
        "relative error of the outputs: 1.2e-02, infinite",
        "relative error of all gradients together: 2.5e-01",
        "first overflow: aten.mm (backward) in no module, model.py:7",
        "first flush to zero: none",
    ]
    assert "\nalone: an op's own error, against f64 on" in text and "not finite:" not in text
    assert text.splitlines()[-1] == "not run in high precision: my.op, my.other"


def test_what_is_not_finite_is_named_first() -> None:
    fine, large = op("aten.add", "a"), op("aten.mm", "", overflowed=0.5)
    lost = [
        replace(fine, numbers=replace(fine.numbers, local=math.nan, not_finite=m, not_finite_exact=e))
        for m, e in ((0.5, 0.0), (1.0, 1.0), (0.0, 0.25))
    ]
    inputs = {f"input x{i}": 0.5 for i in range(5)}
    for first, run in zip(lost, ("the mixed run", "both runs", "the f64 run"), strict=True):
        later = replace(first, op="aten.sub")
        text = render(replace(audit(large, first, later), not_finite=inputs), 160)
        assert text.splitlines()[1:3] == [
            "not finite: input x0 (50.0%), input x1 (50.0%), input x2 (50.0%) and 2 more",
            f"first not finite: aten.add in a, model.py:7, in {run}; 2 ops in all",
        ]
        table = rows(text, "op, the worst first")
        assert table[0][0] == "aten.add" and table[1][:2] == ["aten.mm", "(backward)"], "before what overflows"
        assert table[0][4:6] == ["not", "finite"]
    assert "to zero not finite in f64" in text
    assert "not finite" not in render(audit(fine), 160)
    assert "in f64" not in render(audit(lost[0]), 160)


def test_ops_are_sorted_by_overflow_then_flush_then_error() -> None:
    found = [op("small", "m"), op("large", "m", 0.5), op("zero", "m", flushed=0.25), op("inf", "m", overflowed=0.0005)]
    text = render(audit(*found, op("none", "m", None)), 140)
    table = rows(text, "op, the worst first")
    assert [row[0] for row in table] == ["inf", "zero", "large", "small", "none"]
    assert table[0] == ["inf", "m", "model.py:7", "bf16", "1.0e-03", "infinite", "1.2e+03", "<0.1%"]
    assert table[1][-1] == "25.0%" and table[4][4:] == ["infinite", "1.2e+03"]


def test_only_the_worst_are_shown_modules_in_the_order_in_which_they_ran() -> None:
    found = [op("aten.add", f"m{i}", local=0.001 * (i % 7 + 1)) for i in range(MODULES + 5)]
    text = render(audit(*found), 140)
    assert f"module (the worst {MODULES} of {MODULES + 5})" in text
    names = [row[0] for row in rows(text, "module (the worst")]
    assert len(names) == MODULES and names == sorted(names, key=lambda name: int(name[1:]))
    assert {f"m{i}" for i in range(MODULES + 5) if i % 7} <= set(names)
    assert len(rows(text, "op, the worst first")) == OPS
