"""What is counted is what happened."""

import torch

from benchmarks.counting import profiled


def test_names_of_what_ran_are_collected() -> None:
    x = torch.randn(4)
    with profiled(torch.profiler.ProfilerActivity.CPU) as names:
        x.sum().item()
    assert names.count("aten::_local_scalar_dense") == 1
