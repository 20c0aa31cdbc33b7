"""A sample of the operators as Inductor lowers them, drawn anew by no run: always the same ones."""

import random
from collections.abc import Sequence

from proof.ops import chapter, database
from proof.ops.judge import judge, verdict
from proof.ops.sweep import DEFAULT, SETTINGS
from proof.results import Verdict

OPERATORS = 30
"""Compiling one takes seconds; `--all` takes ten times as many."""


class Inductor:
    """Groups are `operator, setting`, of one call each."""

    title = "Operators, by Inductor"
    says = """One call of operators drawn by a seed, by the same rules; "stock" is Inductor under autocast.
"""
    seconds = 600.0

    def groups(self, everything: bool) -> list[str]:
        """Operators drawn by a seed, the settings in turn."""
        names = random.Random(0).sample(sorted(database.operators()), OPERATORS * (10 if everything else 1))
        settings = sorted(DEFAULT)
        return [f"{name}, {settings[n % len(settings)]}" for n, name in enumerate(names)]

    def run(self, group: str) -> Verdict:
        """As in the sweep, against stock Inductor."""
        name, _, text = group.partition(", ")
        setting = SETTINGS[text]._replace(lower="inductor")
        calls = list(database.drawn(name))[:1]
        return verdict(group, ((place, judge(call, setting, name in database.UNWRITTEN)) for place, call in calls))

    def tabulate(self, verdicts: Sequence[Verdict]) -> str:
        """Outcomes by setting."""
        return chapter.tabulate(verdicts)


PART = Inductor()
