"""Random programs: what stock AOTAutograd gives under autocast, by bits or nearer to float64."""

import pytest
import torch

from tests.compiling import LOW, same_bits
from tests.random_programs import Outcome, outcome, program


def stock(model, compiled=True, outputs="autocast"):
    run = torch.compile(model, backend="aot_eager") if compiled else model

    def under_autocast(*args):
        with torch.autocast("cpu", LOW, cache_enabled=False):
            results = run(*args)
        return [r.float() if r.dtype == LOW else r for r in results] if outputs == "float32" else results

    return under_autocast


def norm(calls):
    """Of all floating numbers together; what is not finite counts as 0, and is left to `overflows`."""
    flat = [t.double().flatten() for call in calls for t in call if t.is_floating_point()]
    return float(torch.cat(flat).nan_to_num(0.0, 0.0, 0.0).norm()) if flat else 0.0


def distance(found, exact):
    return norm(
        [[f.double() - e.double() for f, e in zip(*calls, strict=True)] for calls in zip(found, exact, strict=True)]
    )


def overflows(found, *others):
    """How many floating numbers are infinite or NaN in one outcome and in no other."""
    count = 0
    for calls in zip(found, *others, strict=True):
        for value, *beside in zip(*calls, strict=True):
            finite = [b.isfinite() for b in beside]
            count += int((~value.isfinite() & torch.stack(finite).all(0)).sum())
    return count


def differences(ours: Outcome, theirs: Outcome, exact: Outcome | None) -> list[str]:
    """In what two outcomes differ, but for what comes as near to float64; without an outcome in it, within 1 %."""
    found = []
    if ours.shared != theirs.shared:
        found.append(f"memory shared: {ours.shared}, stock {theirs.shared}")
    for kind in ("results", "left", "gradients"):
        a, b = getattr(ours, kind), getattr(theirs, kind)
        dtypes = [[[t.dtype for t in call] for call in calls] for calls in (a, b)]
        if dtypes[0] != dtypes[1]:
            found.append(f"dtypes of {kind}: {dtypes[0]}, stock {dtypes[1]}")
        elif not same_bits(a, b):
            e = getattr(exact or theirs, kind)
            mine, stocks = distance(a, e), distance(b, e) if exact else 0.01 * norm(b)
            if lost := overflows(a, b, e):
                found.append(f"{kind}: {lost} not finite where stock's and float64's are")
            if mine > 1.1 * stocks + 1e-6:
                found.append(f"{kind}: {mine} from float64, stock {stocks}")
    return found


def check(seed: int, lower: str, outputs: str = "autocast") -> str:
    """What is wrong with a program: nothing is "", "refused" that torch doesn't run it itself.

    A graph that runs as it is is held against eager autocast: what AOTAutograd drops unread may raise there.
    Results that leave in float32 are held against stock's widened ones, which share memory with no other.
    """
    of = program(seed)
    torch._dynamo.reset()
    try:
        theirs = outcome(of, lambda model: stock(model, lower != "eager", outputs))
    except Exception:
        return "refused"
    torch._dynamo.reset()
    options = {"lower": lower, "outputs": outputs}
    try:
        ours = outcome(of, lambda model: torch.compile(model, backend="amp", options=options))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:500]}\n{of.source}"
    if outputs == "float32":
        ours.shared = theirs.shared
    try:
        exact = outcome(of, lambda model: model, exact=True)
    except Exception:
        exact = None
    found = differences(ours, theirs, exact)
    return "\n".join([*found, of.source]) if found else ""


def check_all(seeds, lower, outputs="autocast"):
    wrong = [found for seed in seeds if (found := check(seed, lower, outputs)) not in ("", "refused")]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("start", [0, 8, 16])
def test_a_few(start):
    check_all(range(start, start + 8), "aot_eager")


def test_a_few_whose_results_leave_in_float32():
    check_all(range(24, 32), "aot_eager", "float32")


def test_a_few_with_the_graph_as_it_is():
    """Nothing is functionalized there: autograd itself sees what is written."""
    check_all(range(8), "eager")


@pytest.mark.ci
@pytest.mark.parametrize("outputs", ["autocast", "float32"])
@pytest.mark.parametrize("start", range(32, 96, 16))
def test_a_few_more(start, outputs):
    check_all(range(start, start + 16), "aot_eager", outputs)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 2000, 100))
def test_two_thousand(start):
    check_all(range(start, start + 100), "aot_eager")


def test_a_program_that_is_wrong_is_found():
    right = outcome(program(1), stock)
    wrong = outcome(program(1), stock)
    wrong.results[0][0].flatten()[0] += 0.5
    assert not differences(right, right, None) and differences(wrong, right, None)
    wrong.results[0][0].copy_(right.results[0][0]).flatten()[0] = torch.inf
    assert differences(wrong, right, None), "an overflow, though the other numbers are right"
