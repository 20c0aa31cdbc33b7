"""Each fault as a group of trials in a process of its own, named by what goes wrong."""

from collections.abc import Callable, Sequence

import torch

from benchmarks.report.tables import table
from proof.faults import files, interrupts, lives, raising
from proof.part import Part
from proof.results import Failure, Verdict

COUNTS = "survived", "fails"
Fault = Callable[[], int]
"""Tries it, and returns how often; raises where something is wrong afterwards."""
FAULTS: dict[str, Fault] = {**raising.FAULTS, **interrupts.FAULTS, **files.FAULTS, **lives.FAULTS}


def groups(everything: bool) -> list[str]:
    """All of them, always: none takes more than minutes."""
    return list(FAULTS)


def run(group: str) -> Verdict:
    """How many trials were survived; the first that wasn't ends it."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    try:
        return Verdict(group, {COUNTS[0]: FAULTS[group]()})
    except Exception as error:
        return Verdict(group, {COUNTS[1]: 1}, [Failure("fault", f"{type(error).__name__}: {error}"[:500])])


def tabulate(verdicts: Sequence[Verdict]) -> str:
    """How often each fault was survived."""
    order = list(FAULTS)
    rows = sorted(verdicts, key=lambda verdict: order.index(verdict.group))
    return table(["fault", "survived", "not"], ((v.group, *(str(v.counts.get(k, 0)) for k in COUNTS)) for v in rows))


PART = Part(
    "Faults",
    """A small model trains by `ampcompile.GradScaler` with clipping, and something goes wrong. Then outputs and
gradients must have the bits of eager autocast's, and of a model whose weights are cast at every call; the next step
must change weights as torch's scaler, clipping and AdamW would; autocast, grad mode and the like must be as before; and
without the model no copy of a weight and no replaced attribute of torch may be left. Ctrl-C comes wherever Python looks
for signals in this package's files, a failed allocation wherever they call C++.
""",
    groups,
    run,
    tabulate,
    seconds=900.0,
)
