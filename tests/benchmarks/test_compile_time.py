"""The growth measurement sees growth for what it is."""

import pytest

from benchmarks.compile_time import Growth, exponent, growth


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
def test_exponent(power: float) -> None:
    assert exponent([Growth(n, 3e-6 * n**power) for n in (500, 1000, 4000)]) == pytest.approx(power)


def test_growth_measures_the_graphs_it_says() -> None:
    one, three = growth(depths=(1, 3), repeats=1)
    assert 0 < one.nodes < three.nodes < 3 * one.nodes
    assert one.seconds > 0 and three.seconds > 0
