"""The import is timed in processes of its own."""

from benchmarks.import_time import measure
from benchmarks.peers import AMP


def test_rows() -> None:
    (row,) = measure(2)
    assert row.peer == AMP and len(row.figures["seconds"]) == 2
    assert all(0 < seconds < 60 for seconds in row.figures["seconds"])
