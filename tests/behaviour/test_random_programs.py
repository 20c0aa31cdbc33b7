"""Random programs: what stock AOTAutograd gives under autocast, by bits or nearer to float64."""

import os

import pytest
import torch

from tests.behaviour.beside_stock import Setting, differences
from tests.behaviour.random_modules import program

AUTOCAST = Setting()


def check_all(seeds, setting=AUTOCAST):
    """Judge these programs; `make fuzz` has others in each round."""
    first = int(os.environ["AMPCOMPILE_TEST_SEED"]) % 10**6
    seeds = [first + seed for seed in seeds]
    wrong = [f"{found}\n{program(seed)}" for seed in seeds if (found := setting.judge(program(seed))[1])]
    assert not wrong, "\n".join(wrong)


def test_a_few():
    check_all(range(12))


def test_a_few_whose_results_leave_in_float32():
    check_all(range(20, 25), Setting(outputs="float32"))


def test_a_few_with_the_graph_as_it_is():
    """Nothing is functionalized there: autograd itself sees what is written."""
    check_all(range(4), Setting(lower="eager"))


def test_a_few_for_any_number_of_rows():
    check_all(range(3), Setting(dynamic=True))


@pytest.mark.slow
@pytest.mark.parametrize("outputs", ["autocast", "float32"])
@pytest.mark.parametrize("start", range(12, 96, 14))
def test_a_few_more(start, outputs):
    check_all(range(start, start + 14), Setting(outputs=outputs))


@pytest.mark.slow
@pytest.mark.parametrize("setting", [Setting(dtype=torch.float16), Setting(lower="inductor")])
def test_a_few_in_float16_or_by_inductor(setting):
    check_all(range(96, 108), setting)


def test_a_program_that_is_wrong_is_found():
    right, wrong = (AUTOCAST.run(program(1), AUTOCAST.stock) for _ in range(2))
    wrong.results[0][0].flatten()[0] += 0.5
    assert not differences(right, right, None) and differences(wrong, right, None)
    wrong.results[0][0].copy_(right.results[0][0]).flatten()[0] = torch.inf
    assert differences(wrong, right, None), "an overflow, though the other numbers are right"
