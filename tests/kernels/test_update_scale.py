"""The scale moves as torch's does, bit for bit, inside its bounds; overflows in a row are counted."""

import math
import random

import pytest
import torch

from ampcompile.kernels.update_scale import update_scale_


def updated(scale, tracker, found_infs, growth=2.0, backoff=0.5, interval=3, low=0.0, high=math.inf, skips=0):
    tensors = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32), torch.tensor(skips, dtype=torch.int32)
    update_scale_(*tensors, [torch.tensor(f) for f in found_infs], growth, backoff, interval, low, high)
    return [tensor.item() for tensor in tensors]


def test_random_updates_equal_torchs_bit_for_bit(engine):
    for _ in range(100 if engine.capability else 500):
        scale = random.choice([random.uniform(0, 1e5), 2.0 ** random.randint(-140, 127), 1e38, 0.0, math.inf, math.nan])
        tracker, interval = random.randint(-2, 4), random.randint(0, 4)
        growth, backoff = random.choice([2.0, 1.1, 1.0001, 1e30]), random.choice([0.5, 0.7, 1e-30, 0.0])
        founds = random.choices([0.0, 0.0, 1.0, 2.0, -1.0, math.nan], k=random.randint(1, 2))
        bounds = random.choice([(0.0, math.inf), (2.0**-24, 2.0**64)])
        expected = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
        overflow = any(found != 0 for found in founds)
        torch._amp_update_scale_(*expected, torch.tensor(float(overflow)), growth, backoff, interval)
        expected[0].clamp_(*bounds)
        got = updated(scale, tracker, founds, growth, backoff, interval, *bounds)
        assert str(got) == str([*(tensor.item() for tensor in expected), int(overflow)])  # NaN too


@pytest.mark.parametrize("found_infs", [[0.0, 1.0], [1.0, 1.0], [1.0, -1.0], [0.0, math.nan]])
def test_flags_are_ored_not_summed(found_infs):
    assert updated(8.0, 2, found_infs) == [4.0, 0, 1]
    assert updated(8.0, 2, [0.0, 0.0]) == [16.0, 0, 0]


def test_the_scale_stays_within_its_bounds():
    assert updated(4.0, 0, [1.0], low=3.0) == [3.0, 0, 1]
    assert updated(0.0, 0, [1.0], low=3.0) == [3.0, 0, 1]
    assert updated(8.0, 2, [0.0], high=9.0) == [9.0, 0, 0]
    assert updated(math.inf, 0, [1.0], high=9.0) == [9.0, 0, 1]
    assert updated(1.0, 0, [0.0], low=2.0) == [2.0, 1, 0]


def test_only_overflows_in_a_row_are_counted():
    assert updated(8.0, 0, [1.0], skips=41)[2] == 42
    assert updated(8.0, 0, [0.0], skips=41)[2] == 0
