"""What an audit says of itself: the worst error, the first overflow and flush, and all of it for JSON."""

import json
import math
from dataclasses import replace

import pytest
import torch

from ampcompile.auditing.numbers import Numbers
from ampcompile.auditing.records import OpNumbers
from ampcompile.auditing.result import Audit
from ampcompile.errors import AuditError


def op(name: str, overflowed: float = 0.0, flushed: float = 0.0) -> OpNumbers:
    return OpNumbers(name, "m", "model.py:3", False, torch.float16, Numbers(0.1, None, 2.0, overflowed, flushed, 8))


AUDIT = Audit(
    [op("fine"), op("flushes", 0, 0.5), op("both", 0.5, 0.5)], [0.1, 0.3], {"w": 0.2}, 0.2, ["x"], torch.float64
)


def test_the_first_of_each_kind_is_told() -> None:
    assert AUDIT.first_overflow is not None and AUDIT.first_overflow.op == "both"
    assert AUDIT.first_underflow is not None and AUDIT.first_underflow.op == "flushes"
    lost = replace(AUDIT.ops[0], numbers=Numbers(0.1, None, 2.0, 0.0, 0.0, 8, not_finite_exact=0.5))
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
    assert found["first_overflow"] == {"op": "both", "module": "m", "source": "model.py:3", "backward": False}
    assert found["first_underflow"]["op"] == "flushes"
    assert [(o["op"], o["dtype"], o["overflowed"]) for o in found["ops"]] == [
        ("fine", "f16", 0.0),
        ("flushes", "f16", 0.0),
        ("both", "f16", 0.5),
    ]
    [module] = found["modules"]
    assert (module["module"], module["ops"], module["flushed"], module["elements"]) == ("m", 3, 1 / 3, 24)
    assert replace(AUDIT, ops=()).as_dict()["first_overflow"] is None
