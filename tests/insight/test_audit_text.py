"""An audit of made-up numbers as text and as data: the worst error, the first of each kind, and what is worst first."""

import io
import json
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

import ampcompile
from ampcompile.errors import AuditError
from ampcompile.insight import show
from ampcompile.insight.audit import MODULES, OPS, Audit, measure_call
from ampcompile.records.graphs import Numbers, OpRecord
from tests.insight import made_up


def op(name: str, overflowed: float = 0.0, flushed: float = 0.0) -> OpRecord:
    numbers = Numbers(0.1, None, 2.0, overflowed, flushed, 8)
    return made_up.op(name, source="model.py:3", dtype=torch.float16, numbers=numbers)


AUDIT = Audit(
    [op("fine"), op("flushes", 0, 0.5), op("both", 0.5, 0.5)], [0.1, 0.3], {"w": 0.2}, 0.2, ["x"], torch.float64
)


def test_the_first_of_each_kind_is_told() -> None:
    assert AUDIT.first_overflow is not None and AUDIT.first_overflow.op == "both"
    assert AUDIT.first_underflow is not None and AUDIT.first_underflow.op == "flushes"
    lost = replace(AUDIT.ops[0], numbers=Numbers(0.1, None, 2.0, 0.0, 0.0, 8, not_finite=0.5))
    found = replace(AUDIT, ops=[AUDIT.ops[1], lost], not_finite={"output 0": 0.5})
    assert AUDIT.first_not_finite is None and found.first_not_finite is lost
    told = found.as_dict()
    assert (told["not_finite"], told["first_not_finite"]["op"]) == ({"output 0": 0.5}, "fine")
    fine = replace(AUDIT, ops=AUDIT.ops[:1])
    assert fine.first_overflow is None and fine.first_underflow is None


def test_the_error_is_the_worst_of_outputs_and_gradients() -> None:
    assert AUDIT.error == 0.3
    assert replace(AUDIT, gradient_error=0.5).error == 0.5
    assert replace(AUDIT, gradient_error=None).error == 0.3
    assert replace(AUDIT, outputs=[]).error == 0.2
    with pytest.raises(AuditError, match="no error of the whole run"):
        _ = replace(AUDIT, outputs=[], gradient_error=None).error


def test_an_error_of_which_nothing_is_known_is_no_small_error() -> None:
    for outputs, gradients in (([math.nan, 0.3], 0.2), ([0.1], math.nan)):
        audit = replace(AUDIT, outputs=outputs, gradient_error=gradients)
        assert math.isnan(audit.error)
        with pytest.raises(AuditError, match="found outputs or gradients in which no number is finite in both runs"):
            audit.suggest(0.1)


def test_json_holds_all_of_it() -> None:
    found = json.loads(json.dumps(AUDIT.as_dict()))
    assert (found["against"], found["policy"], found["unmeasured"]) == ("f64", str(AUDIT.policy), ["x"])
    assert (found["outputs"], found["gradient_error"], found["gradients"]) == ([0.1, 0.3], 0.2, {"w": 0.2})
    assert (found["first_overflow"]["op"], found["first_overflow"]["source"]) == ("both", "model.py:3")
    assert found["first_underflow"]["op"] == "flushes"
    assert [(o["op"], o["dtype"], o["numbers"]["overflowed"]) for o in found["ops"]] == [
        ("fine", "f16", 0.0),
        ("flushes", "f16", 0.0),
        ("both", "f16", 0.5),
    ]
    module = found["modules"]["m"]
    assert (module["ops"], module["flushed"], module["elements"]) == (3, 1 / 3, 24)
    assert replace(AUDIT, ops=()).as_dict()["first_overflow"] is None


def mixed(name: str, module: str, local: float | None = 0.001, **found: float) -> OpRecord:
    numbers = Numbers(local, math.inf, 1234.5, found.get("overflowed", 0.0), found.get("flushed", 0.0), 100)
    numbers = replace(numbers, not_finite=found.get("not_finite", 0.0))
    place = {"module": module, "source": "/x/model.py:7", "backward": name == "aten.mm"}
    return made_up.op(name, **place, dtype=torch.bfloat16, numbers=numbers)


def rows(text: str, heading: str) -> list[list[str]]:
    """The rows of the table with this heading, split at blanks."""
    lines = text.partition(f"\n{heading}")[2].partition("\n\n")[0].splitlines()
    return [line.split() for line in lines[1:]]


def test_the_worst_stands_first_in_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    ops = [
        mixed("small", "m"),
        mixed("large", "m", 0.5),
        mixed("zero", "m", flushed=0.25),
        mixed("aten.mm", "", overflowed=0.0005),
        mixed("none", "m", None),
        mixed("lost", "a", math.nan, not_finite=0.5),
    ]
    inputs = {f"input x{i}": 0.5 for i in range(5)}
    found = Audit(ops, [0.0123, math.inf], {}, 0.25, ["my.op", "my.other"], torch.float64, not_finite=inputs)
    text = str(found)
    assert text.splitlines()[:7] == [
        "mixed run against f64: 6 ops",
        "not finite: input x0 (50.0%), input x1 (50.0%), input x2 (50.0%) and 2 more",
        "first not finite: lost in a, model.py:7; 1 ops in all",
        "relative error of the outputs: 1.2e-02, infinite",
        "relative error of all gradients together: 2.5e-01",
        "first overflow: aten.mm (backward) in no module, model.py:7",
        "first flush to zero: zero in m, model.py:7",
    ]
    assert text.splitlines()[-1] == "not run in high precision: my.op, my.other"
    table = rows(text, "op, the worst first")
    assert [row[0] for row in table] == ["lost", "aten.mm", "zero", "large", "small", "none"]
    assert table[0][4:6] == ["not", "finite"] and table[2][-1] == "25.0%" and table[5][4:] == ["infinite", "1.2e+03"]
    many = [mixed("aten.add", f"m{i}", 0.001 * (i % 7 + 1)) for i in range(MODULES + 5)]
    text = str(replace(found, ops=many, not_finite={}))
    names = [row[0] for row in rows(text, f"module (the worst {MODULES} of {MODULES + 5})")]
    assert len(names) == MODULES and names == sorted(names, key=lambda name: int(name[1:])), "as they ran"
    assert {f"m{i}" for i in range(MODULES + 5) if i % 7} <= set(names)
    assert len(rows(text, "op, the worst first")) == OPS and "not finite" not in text


def test_a_terminal_shows_how_far_audits_searches_and_recordings_are(monkeypatch):
    shown = io.StringIO()
    terminal = {"file": shown, "force_terminal": True}
    monkeypatch.setattr(show, "Console", lambda stderr=False, **how: Console(**terminal | how))
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(3, 8)
    audit = ampcompile.audit(model)(x)
    assert "auditing" in shown.getvalue()
    audit.suggest(1e-6)
    assert "searching" in shown.getvalue()
    ampcompile.record(model, lower="aot_eager")(x)
    assert "recording" in shown.getvalue()
    said = []
    measure_call(audit.call, progress=said.append)
    assert len(said) == len(audit.ops) and said[0].startswith("1 ops measured, aten.")
