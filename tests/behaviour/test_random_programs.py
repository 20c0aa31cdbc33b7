"""Random programs: what stock AOTAutograd gives under autocast, by bits or nearer to float64."""

import os

import pytest
import torch

from tests.behaviour.beside_stock import Setting, differences
from tests.behaviour.programs import Program

AUTOCAST = Setting()


SLOW = [range(start, start + 16) for start in range(8, 104, 16)]
DRAWN = [
    (range(8), AUTOCAST),
    (range(20, 26), Setting(outputs="float32")),
    (range(5), Setting(lower="eager")),  # nothing is functionalized there: autograd itself sees what is written
    (range(3), Setting(dynamic=True)),
    *(
        pytest.param(seeds, Setting(outputs=of), marks=pytest.mark.slow)
        for seeds in SLOW
        for of in ("autocast", "float32")
    ),
    pytest.param(range(104, 118), Setting(dtype=torch.float16), marks=pytest.mark.slow),
    pytest.param(range(104, 118), Setting(lower="inductor"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("seeds", "setting"), DRAWN, ids=str)
def test_drawn_programs(seeds, setting):
    """`make fuzz` has others in each round."""
    first = int(os.environ["AMPCOMPILE_TEST_SEED"]) % 10**6
    programs = [Program.drawn(first + seed) for seed in seeds]
    wrong = [f"{found}\n{each}" for each in programs if (found := setting.judge(each)[1])]
    assert not wrong, "\n".join(wrong)


def test_a_program_that_is_wrong_is_found():
    right, wrong = (AUTOCAST.run(Program.drawn(1), AUTOCAST.stock) for _ in range(2))
    wrong.results[0][0].flatten()[0] += 0.5
    assert not differences(right, right, None) and differences(wrong, right, None)
    wrong.results[0][0].copy_(right.results[0][0]).flatten()[0] = torch.inf
    assert differences(wrong, right, None), "an overflow, though the other numbers are right"
