"""The list of mutations is of the code as it is, and names tests that are there."""

import json
from pathlib import Path

from tests.mutations import LIST, ROOT, Mutation

MUTATIONS = [Mutation(**json.loads(line)) for line in LIST.read_text().splitlines()]


def test_each_is_of_a_line_that_is_there() -> None:
    gone = [str(each) for each in MUTATIONS if each.applied((ROOT / each.path).read_text()) is None]
    assert not gone, "python -m tests.mutations --draw N finds others"


def test_each_names_a_test_that_is_there() -> None:
    names = {each.caught.partition("[")[0] for each in MUTATIONS if each.caught}
    files = {name: Path(ROOT, name.partition("::")[0]) for name in names}
    gone = [
        name
        for name, file in files.items()
        if not file.exists() or f"def {name.rpartition('::')[2]}(" not in file.read_text()
    ]
    assert not gone
