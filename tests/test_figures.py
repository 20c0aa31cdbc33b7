"""CONTRIBUTING shows each figure that `make figures` measures, with its limit."""

import re

from tests import figures


def test_contributing_shows_the_figures_and_their_limits() -> None:
    shown = figures.CONTRIBUTING.read_text().partition(figures.HEADING)[2]
    rows = re.findall(r"\| (.+) \| [\d,]+ \| ([\d,]+) \|\n", shown)
    assert rows == [(name, f"{limit:,}") for name, (limit, _) in figures.FIGURES.items()]


def test_names_are_counted_as_the_rule_says() -> None:
    assert figures.uses("VERSION") >= 5 and figures.uses("no_such_name") == 0
    names = set(figures.reached())
    assert {"_warn_of_device", "_has_instance"} <= names & set(figures.defined())
