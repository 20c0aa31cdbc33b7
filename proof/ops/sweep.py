"""Every operator of torch's database in float32, forward and backward, under each 16-bit type."""

import itertools
from collections.abc import Sequence

from ampcompile.dtypes import LOW
from proof.ops import chapter, database
from proof.ops.judge import Setting, judge, verdict
from proof.results import Verdict

SETTINGS = {str(s): s for s in itertools.starmap(Setting, itertools.product(LOW, (True, False), (True, False)))}
DEFAULT = {name for name, s in SETTINGS.items() if s.ambient == s.gradients}
"""Both places of a call and both modes, each pair of them once."""
REST = ", rest"


class Sweep:
    """Groups are `operator, setting`, and `operator, setting, rest` for the samples beyond the default ones."""

    title = "Operators"
    says = chapter.RULES
    seconds = 600.0

    def groups(self, everything: bool) -> list[str]:
        """Four settings of each operator, or all eight, and the rest of its samples."""
        settings, beyond = (SETTINGS, ("", REST)) if everything else (sorted(DEFAULT), ("",))
        return [f"{name}, {s}{rest}" for name in database.operators() for s in settings for rest in beyond]

    def run(self, group: str) -> Verdict:
        """Of the samples drawn, or of the rest."""
        name, _, text = group.partition(", ")
        setting, unwritten = SETTINGS[text.removesuffix(REST)], name in database.UNWRITTEN
        calls = database.drawn(name, rest=text.endswith(REST))
        return verdict(group, ((place, judge(call, setting, unwritten)) for place, call in calls))

    def tabulate(self, verdicts: Sequence[Verdict]) -> str:
        """Outcomes by setting."""
        return chapter.tabulate(verdicts)


PART = Sweep()
