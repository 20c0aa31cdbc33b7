"""What is counted is what happened."""

import pytest
import torch

from benchmarks.counting import profile_gpu, profiled, sum_spans


def test_time_on_a_gpu_is_what_runs_and_idle_what_lies_between() -> None:
    assert sum_spans([(10.0, 14.0), (0.0, 4.0), (3.0, 5.0), (11.0, 12.0)]) == (11.0, 5.0)
    assert sum_spans([]) == (0.0, 0.0)


def test_names_of_what_ran_are_collected() -> None:
    x = torch.randn(4)
    with profiled(torch.profiler.ProfilerActivity.CPU) as names:
        x.sum().item()
    assert names.count("aten::_local_scalar_dense") == 1


@pytest.mark.gpu
def test_launches_and_seconds_of_a_gpu() -> None:
    x = torch.randn(4, device="cuda")
    found = profile_gpu(lambda: [x.add_(1) for _ in range(5)])
    assert found["launches"] == 5 and 0 < found["gpu_seconds"] < 1e-3
    assert 1e-3 < profile_gpu(lambda: torch.cuda._sleep(20_000_000))["gpu_seconds"] < 1
