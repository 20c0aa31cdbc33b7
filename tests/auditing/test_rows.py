"""Two runs side by side: every step once, in the order of both, with the limits that rounding sets."""

from dataclasses import replace

from ampcompile.auditing.recording import Step
from ampcompile.auditing.records import Place
from ampcompile.auditing.rows import make_rows

STEP = Step(Place("aten.mul", "head", "net.py:3", False), "f32", (4,), (1.0,) * 9, 1e-7, 1e-7, 1.0, ())


def step(op: str, **changes: object) -> Step:
    return replace(STEP, place=replace(STEP.place, op=op), **changes)


def test_what_one_run_has_alone_stands_before_the_next_pair() -> None:
    a, b = ([step(op) for op in ops] for ops in ("uvxy", "vwxz"))
    rows = list(make_rows(a, b))
    assert [(row.a and row.a.place.op, row.b and row.b.place.op) for row in rows] == [
        ("u", None), ("v", "v"), (None, "w"), ("x", "x"), ("y", None), (None, "z"),
    ]  # fmt: skip
    assert not any(row.why for row in rows)
    assert [row.limits is None for row in rows] == [row.a is None or row.b is None for row in rows]


def test_each_limit_is_told_apart() -> None:
    for changes, exceeds, why in (
        ({}, (False, False, False), ""),
        ({"exact": (1.0, *(1.001,) * 8)}, (True, False, False), "computed in float64"),
        ({"alone": 1e-3, "from_start": 1e-7}, (False, True, False), "the op's own error is 1.0e-07 in a, 1.0e-03 in b"),
        ({"from_start": 1e-3}, (False, False, True), "the error so far is 1.0e-07 in a, 1.0e-03 in b"),
        ({"dtype": "bf16"}, (False, False, False), "f32 in a, bf16 in b"),
        ({"alone": float("nan")}, (False, False, False), ""),
        ({"alone": None}, (False, False, False), ""),
    ):
        [row] = make_rows([STEP], [replace(STEP, **changes)])
        assert row.exceeds == exceeds and row.why.startswith(why) and bool(row.why) == bool(why)
