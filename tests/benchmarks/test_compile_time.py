"""Our passes are timed on the graphs that are said, the import in processes of its own."""

from benchmarks.compile_time import import_time, pass_growth
from benchmarks.peers import AMP


def test_growth_measures_the_graphs_it_says() -> None:
    one, three = (row.figures for row in pass_growth((1, 3), repeats=1))
    assert 0 < one["nodes"] < three["nodes"] < 3 * one["nodes"]
    assert min(one["seconds"] + three["seconds"]) > 0


def test_import_time() -> None:
    (row,) = import_time(2)
    assert row.peer == AMP and len(row.figures["seconds"]) == 2
    assert all(0 < seconds < 60 for seconds in row.figures["seconds"])
