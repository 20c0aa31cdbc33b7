"""Random programs: what stock AOTAutograd gives under autocast, by bits or nearer to float64."""

import pytest
import torch

from tests.compiling import LOW, same_bits
from tests.random_programs import Outcome, outcome, program


def stock(model):
    run = torch.compile(model, backend="aot_eager")

    def under_autocast(*args):
        with torch.autocast("cpu", LOW, cache_enabled=False):
            return run(*args)

    return under_autocast


def distance(found, exact):
    pairs = [(f.double(), e.double()) for f, e in zip(sum(found, []), sum(exact, []), strict=True) if f.is_floating_point()]
    return float(sum((f - e).nan_to_num().square().sum() for f, e in pairs)) ** 0.5


def differences(ours: Outcome, theirs: Outcome, exact: Outcome | None) -> list[str]:
    """In what two outcomes differ, but for what comes nearer to float64."""
    found = []
    if ours.shared != theirs.shared:
        found.append(f"memory shared: {ours.shared}, stock {theirs.shared}")
    for kind in ("results", "left", "gradients"):
        a, b = getattr(ours, kind), getattr(theirs, kind)
        dtypes = [[[t.dtype for t in call] for call in calls] for calls in (a, b)]
        if dtypes[0] != dtypes[1]:
            found.append(f"dtypes of {kind}: {dtypes[0]}, stock {dtypes[1]}")
        elif not same_bits(a, b):
            if exact is None:
                found.append(f"{kind} differ by {distance(a, b)}")
                continue
            e = getattr(exact, kind)
            mine, stocks = distance(a, e), distance(b, e)
            if mine > 1.1 * stocks + 1e-6:
                found.append(f"{kind}: {mine} from float64, stock {stocks}")
    return found


def check(seed: int, lower: str) -> str:
    """"" if a program is right, "refused" if stock doesn't run it, else what is wrong with it."""
    of = program(seed)
    torch._dynamo.reset()
    try:
        theirs = outcome(of, stock)
    except Exception:
        return "refused"
    torch._dynamo.reset()
    options = {"lower": lower}
    try:
        ours = outcome(of, lambda model: torch.compile(model, backend="amp", options=options))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:500]}\n{of.source}"
    try:
        exact = outcome(of, lambda model: model, exact=True)
    except Exception:
        exact = None
    found = differences(ours, theirs, exact)
    return "\n".join([*found, of.source]) if found else ""
